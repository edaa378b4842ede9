"""Applies the house rules (house_rules.py) to the whole tree, and shows that each rule can fail."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import house_rules as rules
import pytest

from fasttfm.models.families import FAMILIES
from fasttfm.tasks.registry import TASKS

ROOT = Path(__file__).parent.parent
FOLDERS = ("kernels", "csrc", "python", "tests", "benchmarks", "tools", "docs")
CPP = (".h", ".cuh", ".cpp", ".cu")


def sources(*suffixes: str, folders: tuple[str, ...] = FOLDERS) -> Iterator[tuple[str, str]]:
    """Path (relative to the root) and text of the tree's files."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path.relative_to(ROOT).as_posix(), path.read_text()


def modules() -> Iterator[tuple[str, str]]:
    """Module name and text of everything that is installed as fasttfm."""
    for path, text in sources(".py", folders=("python", "kernels")):
        name = path.removeprefix("python/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        yield (f"fasttfm.{name}" if path.startswith("kernels/") else name), text


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


# ---- the tree --------------------------------------------------------------------------------------------------------


def test_every_op_has_all_its_files() -> None:
    assert "layer_norm" in rules.ops_found(ROOT)
    assert rules.missing_files(ROOT) == []


def test_kernel_folders_hold_one_file_per_language() -> None:
    assert rules.stray_kernel_files(ROOT) == []


def test_includes() -> None:
    found = list(sources(*CPP, folders=("kernels", "csrc")))
    assert found
    assert [violation for path, text in found for violation in rules.forbidden_includes(path, text)] == []


def test_no_header_has_an_anonymous_namespace() -> None:
    found = list(sources(*CPP, folders=("kernels", "csrc")))
    assert [violation for path, text in found for violation in rules.anonymous_namespaces(path, text)] == []


def test_imports_run_one_way() -> None:
    found = dict(modules())
    assert {"fasttfm", "fasttfm.ops.layer_norm", "fasttfm.kernels.layer_norm.triton"} <= found.keys()
    assert [violation for module, text in found.items() for violation in rules.backward_imports(module, text)] == []


def test_no_import_cycles() -> None:
    assert rules.import_cycle(dict(modules())) == []


def test_every_triton_kernel_is_launched_from_cpp() -> None:
    found = list(sources(".py", folders=("kernels",)))
    assert [violation for path, text in found for violation in rules.undecorated_kernels(path, text)] == []


def test_no_file_is_long() -> None:
    found = list(sources(".py", ".pyi", ".md", *CPP))
    assert [violation for path, text in found for violation in rules.long_file(path, text)] == []


def test_no_function_is_long() -> None:
    python = [violation for path, text in sources(".py") for violation in rules.long_python_functions(path, text)]
    cpp = [violation for path, text in sources(*CPP) for violation in rules.long_cpp_functions(path, text)]
    assert python + cpp == []


def test_no_public_function_has_many_arguments() -> None:
    found = sources(".py", folders=("python", "kernels"))
    assert [violation for path, text in found for violation in rules.many_arguments(path, text)] == []


def test_no_tensor_has_torchs_defaults() -> None:
    found = list(sources(".py", folders=("python", "kernels")))
    assert [violation for path, text in found for violation in rules.implicit_defaults(path, text)] == []


def test_families_and_tasks_are_listed_once() -> None:
    names = [family.config.model_type for family in FAMILIES.values()]
    registries = ({*names, *FAMILIES}, TASKS)
    found = sources(".py", folders=("python", "benchmarks"))
    assert [violation for path, text in found for violation in rules.second_lists(path, text, *registries)] == []


def test_text_is_in_the_fields_terms() -> None:
    pages = [(name, (ROOT / name).read_text()) for name in ("README.md", "CONTRIBUTING.md")]
    found = [(path, text) for path, text in (*sources(".py", ".pyi", ".md", *CPP), *pages) if _is_prose(path)]
    assert [violation for path, text in found for violation in rules.private_phrases(path, text)] == []


def _is_prose(path: str) -> bool:
    """The rules and their tests contain what they reject; docs/notes is history."""
    return not path.startswith("docs/notes/") and path not in ("tests/house_rules.py", "tests/test_house.py")


# ---- the rules can fail ----------------------------------------------------------------------------------------------


def test_an_op_without_a_test_or_a_page_is_found(tmp_path: Path) -> None:
    for pattern in rules.FILES_OF_AN_OP:
        path = tmp_path / pattern.format(op="scale")
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "python/fasttfm/ops/vocabulary.py").touch()
    assert rules.missing_files(tmp_path) == []
    (tmp_path / "tests/ops/test_scale.py").unlink()
    assert rules.missing_files(tmp_path) == ["scale: there is no tests/ops/test_scale.py"]
    (tmp_path / "docs/ops/shift.md").touch()
    assert "shift: there is no kernels/shift/reference.py" in rules.missing_files(tmp_path)


def test_a_stray_kernel_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "kernels/scale").mkdir(parents=True)
    for name in ("cpu.cpp", "tiles.cuh", "triton_v2.py"):
        (tmp_path / "kernels/scale" / name).touch()
    (found,) = rules.stray_kernel_files(tmp_path)
    assert found.startswith("kernels/scale/triton_v2.py: ")


@pytest.mark.parametrize(
    ("path", "line", "allowed"),
    [
        ("kernels/scale/cpu.cpp", "#include <torch/extension.h>", False),
        ("csrc/scale.cpp", '  # include "ATen/ATen.h"', False),
        ("kernels/scale/op.h", "#include <pybind11/pybind11.h>", False),
        ("kernels/scale/op.h", "#include <Python.h>", False),
        ("csrc/scale.cpp", "#include <pybind11/pybind11.h>", True),
        ("kernels/scale/op.h", "// not #include <torch/extension.h>", True),
    ],
)
def test_forbidden_includes_are_found(path: str, line: str, allowed: bool) -> None:
    assert (rules.forbidden_includes(path, f"#pragma once\n{line}\n") == []) is allowed


def test_anonymous_namespaces_are_found() -> None:
    text = "namespace fasttfm {\nnamespace {\n}  // namespace\n}\n"
    assert len(rules.anonymous_namespaces("kernels/scale/tiles.cuh", text)) == 1
    assert rules.anonymous_namespaces("kernels/scale/cuda.cu", text) == []
    assert rules.anonymous_namespaces("kernels/scale/op.h", text.replace("namespace {", "namespace scale {")) == []


@pytest.mark.parametrize(
    ("module", "line", "allowed"),
    [
        ("fasttfm.kernels.scale.triton", "from fasttfm.kernels.common.rows import as_rows", True),
        ("fasttfm.kernels.scale.triton", "from fasttfm.kernels.shift import triton", False),
        ("fasttfm.kernels.scale.triton", "from ..shift.triton import shift", False),
        ("fasttfm.kernels.scale.triton", "from fasttfm.kernels.scale.reference import scale", False),
        ("fasttfm.kernels.scale.triton", "from fasttfm.kernels.scale import reference", False),
        ("fasttfm.kernels.scale.triton", "from .reference import scale", False),
        ("fasttfm.kernels.scale.triton", "import fasttfm.ops.core.checks", False),
        ("fasttfm.kernels.scale.triton", "def f():\n    from fasttfm import ops", False),
        ("fasttfm.kernels.scale.triton", "from fasttfm import _C", False),
        ("fasttfm.ops.scale", "from fasttfm.kernels.scale import reference", True),
        ("fasttfm.ops.scale", "from fasttfm.kernels.shift import reference", False),
        ("fasttfm.ops.scale_native", "from fasttfm.kernels.scale.problem import Problem", True),
        ("fasttfm.ops.scale_native", "from fasttfm.kernels.shift.problem import Problem", False),
        ("fasttfm.ops.scale", "from fasttfm import _native", True),
        ("fasttfm.ops.scale", "from fasttfm.nn import Scale", False),
        ("fasttfm.nn.scale", "from fasttfm import ops", True),
        ("fasttfm.nn.scale", "from fasttfm.kernels.scale import triton", False),
        ("fasttfm.nn.scale", "from fasttfm.models.bert import Bert", False),
        ("fasttfm.models.bert", "from fasttfm.train import loop", False),
        ("fasttfm.train.loop", "from fasttfm.models.bert import Bert", True),
        ("fasttfm.train.loop", "from fasttfm.cli.main import main", False),
        ("fasttfm.testing.specs.scale", "from fasttfm.kernels.scale import reference", True),
        ("fasttfm.testing.harness", "from fasttfm.models import bert", False),
        ("fasttfm.testing.harness", "from fasttfm.testing.seams import plan", False),
        ("fasttfm.testing.seams.models", "from fasttfm.models import bert", True),
        ("fasttfm.ops.scale", "from fasttfm.testing import tolerance", False),
        ("fasttfm.cli.info", "from fasttfm.testing import tolerance", True),
        ("fasttfm.cellar", "import torch", False),
    ],
)
def test_backward_imports_are_found(module: str, line: str, allowed: bool) -> None:
    assert (rules.backward_imports(module, line) == []) is allowed


def test_an_import_cycle_is_found() -> None:
    texts = {
        "fasttfm.data.a": "from fasttfm.data import b",
        "fasttfm.data.b": "from fasttfm.data.c import read",
        "fasttfm.data.c": "import json",
    }
    assert rules.import_cycle(texts) == []
    texts["fasttfm.data.c"] = "def read():\n    from fasttfm.data.a import table"
    assert {"fasttfm.data.a", "fasttfm.data.b", "fasttfm.data.c"} == set(rules.import_cycle(texts))


def test_undecorated_kernels_are_found() -> None:
    text = "@triton.jit\ndef add_kernel(): ...\n"
    assert len(rules.undecorated_kernels("triton.py", text)) == 1
    assert rules.undecorated_kernels("triton.py", f"@launched_kernel\n{text}") == []
    assert rules.undecorated_kernels("triton.py", "@triton.jit\ndef add(): ...\n") == []


@pytest.mark.parametrize(
    ("line", "absent"),
    [
        ("torch.zeros(3)", "dtype and device"),
        ("torch.zeros(3, device=x.device)", "dtype"),
        ("torch.tensor([1.0], dtype=torch.float32)", "device"),
        ("torch.arange(3)", "device"),
        ("torch.arange(0.0, 3, device='cpu')", "dtype"),
        ("torch.randperm(3, generator=torch.Generator('cpu'))", "device"),
        ("torch.Generator()", "device"),
        ("torch.arange(3, device='cpu')", None),
        ("torch.zeros(3, **options)", None),
        ("torch.zeros_like(x)", None),
        ("x.new_zeros(3)", None),
        ("np.zeros(3)", None),
    ],
)
def test_torchs_defaults_are_found(line: str, absent: str | None) -> None:
    found = rules.implicit_defaults("python/fasttfm/x.py", line)
    assert [each.rpartition("expected ")[2] for each in found] == ([] if absent is None else [absent])
    assert rules.implicit_defaults("python/fasttfm/testing/x.py", line) == []


def test_long_files_are_found() -> None:
    assert rules.long_file("a.py", "x = 1\n" * rules.MAX_FILE_LINES) == []
    assert rules.long_file("a.py", "x = 1\n" * (rules.MAX_FILE_LINES + 1)) != []


@pytest.mark.parametrize(
    ("decorator", "limit"),
    [("", 80), ("@staticmethod\n", 80), ("@triton.jit\n", 150), ("@triton.jit(debug=True)\n", 150)],
)
def test_long_python_functions_are_found(decorator: str, limit: int) -> None:
    def function(lines: int) -> str:
        return f"{decorator}def f():\n" + "    x = 1\n" * (lines - 1)

    assert rules.long_python_functions("a.py", function(limit)) == []
    assert rules.long_python_functions("a.py", function(limit + 1)) != []


@pytest.mark.parametrize(
    ("header", "limit"),
    [
        ("void f(int a) {", 80),
        ("template <class T>\ninline int Class::f(T a) const noexcept {", 80),
        ("auto f(int a) -> std::vector<int> {", 80),
        ("Class(int a) : member_(a) {", 80),
        ("__global__ void kernel(const float* x) {", 150),
    ],
)
def test_long_cpp_functions_are_found(header: str, limit: int) -> None:
    def file(lines: int) -> str:
        body = "  if (a) {  // not a } brace\n    print(\"}\", '{');\n  }\n"
        fill = "  ++a;\n" * (lines - 1 - f"{header}\n{body}".count("\n"))
        return f"#define OPEN {{ \\\n  {{\nnamespace n {{\nstruct S {{ int a; }};\n{header}\n{body}{fill}}}\n}}\n"

    assert rules.long_cpp_functions("a.cpp", file(limit)) == []
    assert rules.long_cpp_functions("a.cpp", file(limit + 1)) != []


def test_cpp_functions_are_distinguished_from_other_braces() -> None:
    text = """
        namespace fasttfm {
        struct Params { int x; };
        const int table[] = {1, 2};
        void launch(const Params& p) {
          auto body = [&](int i) { for (;;) { work(i); } };
        }
        int small() { return 1; }
        }
    """
    found = [(header.strip(), lines) for header, lines in rules.cpp_functions(dedent(text))]
    assert found == [("void launch(const Params& p)", 3), ("int small()", 1)]


def test_many_arguments_are_found() -> None:
    eight, nine = (", ".join(f"a{i}" for i in range(count)) for count in (8, 9))
    thirteen = ", ".join(f"a{i}" for i in range(13))

    def count(path: str, text: str) -> int:
        return len(rules.many_arguments(path, dedent(text)))

    assert count("python/fasttfm/a.py", f"def f({eight}, *, b, c): ...") == 0
    assert count("python/fasttfm/a.py", f"def f({nine}): ...") == 1
    assert count("python/fasttfm/a.py", f"def f(b, /, {eight}): ...") == 1
    assert count("python/fasttfm/a.py", f"def _f({nine}): ...") == 0
    assert count("python/fasttfm/a.py", f"class C:\n    def f(self, {eight}): ...") == 0
    assert count("python/fasttfm/a.py", f"class C:\n    def f(self, {nine}): ...") == 1
    assert count("kernels/scale/triton.py", f"def f({nine}): ...") == 0
    assert count("kernels/scale/triton.py", f"def f({thirteen}): ...") == 1
    assert count("kernels/scale/triton.py", f"@triton.jit\ndef f({thirteen}): ...") == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('MODELS = ("bert", "gpt2", "albert")', 1),
        ('def f():\n    return {"bert": 1, "gpt2": 2, "albert": 3}', 1),
        ('SPECIAL = ("bert", "gpt2")', 0),
        ('names = ("bert", "anna", "otto")', 0),
    ],
)
def test_a_second_list_is_found(text: str, count: int) -> None:
    assert len(rules.second_lists("f.py", text, ("bert", "albert", "gpt2"))) == count


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("kernels/scale/cuda.cu", "// TMA writes to L2, and tensor cores read it.", 0),
        ("kernels/scale/cuda.cu", "// The copy engine writes to the second level cache.", 2),
        ("python/fasttfm/a.py", "# The tail stands\n# behind the vendor's product, alone.", 4),
        ("python/fasttfm/a.py", 'parser.add_argument("--held-out"); shards.split(held_out=0.1); kept_beside()', 0),
        ("python/fasttfm/a.py", "# Losses of masked words that are held out", 2),
        ("tests/test_a.py", "alone = MASKS['behind']  # nobody looks", 1),
        ("python/fasttfm/a.py", "# The likeliest of so many, a name out of TASKS, is told.", 4),
        ("kernels/scale/op.h", "// It waits for nothing, and serves any call that is waited for anew.", 4),
        ("CONTRIBUTING.md", "Write it.\n\n## Vocabulary\n\n| copy engine | TMA |", 0),
    ],
)
def test_private_phrases_are_found(path: str, text: str, count: int) -> None:
    assert len(rules.private_phrases(path, text)) == count
