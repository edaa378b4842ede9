"""The command line: ``fasttfm info`` with and without optional parts, and errors for wrong arguments."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fasttfm
from fasttfm import _C, _native
from fasttfm.cli import doctor, info
from fasttfm.cli.main import COMMANDS, main
from fasttfm.ops.core.backends import Backend, BackendTable
from fasttfm.testing.specs import all_specs

SPECS = all_specs()


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fasttfm", *arguments], capture_output=True, text=True)


def run_prepared(*statements: str) -> str:
    """The output of ``fasttfm info`` in a new interpreter that runs these first, because backends cache their
    results."""
    code = "\n".join(
        ["import sys", *statements, "from fasttfm.cli.main import main", "raise SystemExit(main(['info']))"]
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_without(*modules: str) -> str:
    return run_prepared(*(f"sys.modules[{name!r}] = None" for name in modules))


def test_an_import_leaves_out_what_takes_seconds() -> None:
    code = "import sys, fasttfm, fasttfm.cli.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "fasttfm.ops" in loaded
    heavy = ("torch._dynamo", "torch._inductor", "triton", "transformers", "sklearn", "matplotlib")
    assert not {*heavy} & {*loaded}


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.split()[:1] == [name])


def test_the_installed_command_is_main() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["fasttfm"].partition(":")
    assert getattr(importlib.import_module(module), function) is main


def test_info_names_versions_devices_and_ops() -> None:
    result = run_cli("info")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"fasttfm {fasttfm.__version__}\n")
    assert torch.__version__ in line_of(result.stdout, "torch")
    assert _C.compiler in line_of(result.stdout, "core")
    assert _C.active_isa() in line_of(result.stdout, "instructions")
    assert line_of(result.stdout, "layer_norm").split()[1] == "yes"  # the native core, first by name


def test_info_without_triton() -> None:
    text = run_without("triton")
    assert "not installed" in line_of(text, "triton")
    assert "] Triton is not installed" in text


def test_info_without_the_native_core() -> None:
    text = run_without("fasttfm._C")
    assert "missing" in line_of(text, "core")
    assert "`pip install .` builds it" in text
    assert line_of(text, "layer_norm").split()[-1] == "yes"  # the reference is still available


def test_info_without_either() -> None:
    text = run_without("triton", "fasttfm._C")
    assert line_of(text, "layer_norm").count("yes") == 1


def test_info_with_a_core_built_without_cuda() -> None:
    text = run_prepared("from fasttfm import _C", "_C.cuda_version = 0")
    assert "without CUDA" in line_of(text, "core")
    assert "the native core was built without CUDA" in text


def test_info_with_a_gpu() -> None:
    text = run_prepared(
        "import torch, types",
        "gpu = types.SimpleNamespace(name='A GPU', total_memory=80 * 2**30, major=9, minor=0)",
        "torch.cuda.is_available = lambda: True",
        "torch.cuda.device_count = lambda: 2",
        "torch.cuda.get_device_properties = lambda index: gpu",
    )
    assert line_of(text, "cuda:1").split(maxsplit=1)[1] == "A GPU, 80.0 GiB, compute capability 9.0"


def test_info_with_a_gpu_that_the_build_has_no_code_for() -> None:
    text = run_prepared(
        "import torch, types",
        "from fasttfm import _native",
        "gpu = types.SimpleNamespace(name='A GPU', total_memory=16 * 2**30, major=7, minor=5)",
        "torch.cuda.is_available = lambda: True",
        "torch.cuda.device_count = lambda: 1",
        "torch.cuda.get_device_properties = lambda index: gpu",
        "_native.missing_cuda = lambda: None",
        "_native.missing_on = lambda index: 'it is too old'",
    )
    assert line_of(text, "cuda:0").endswith("compute capability 7.5; no CUDA kernels: it is too old")


def test_info_reports_threads_that_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "shared_openmp", lambda: ("", "torch has no OpenMP"))
    assert line_of(info.report(), "threads").endswith("started per call: torch has no OpenMP")


def test_backend_table_numbers_each_reason_once() -> None:
    def backend(name: str, reason: str | None) -> Backend:
        return Backend(name, lambda: reason, lambda *_: None, print, print)  # never called

    class Table(BackendTable):
        def __post_init__(self) -> None:  # stays out of the process-wide register
            object.__setattr__(self, "names", tuple(backend.name for backend in self.backends))

    tables = {
        "first": Table("first", (backend("cuda", "no GPU"), backend("reference", None))),
        "second": Table("second", (backend("cuda", "no GPU"), backend("cpu", "no core"), backend("reference", None))),
    }
    wide = info.backend_table({"op": Table("op", (backend("a_long_backend", "no"), backend("reference", None)))})
    assert wide.splitlines()[0].index("reference") == wide.splitlines()[1].index("yes")
    lines = [line.split() for line in info.backend_table(tables).splitlines()]
    assert lines[0] == ["cpu", "cuda", "reference"]
    assert lines[1] == ["first", "-", "no", "[1]", "yes"]
    assert lines[2] == ["second", "no", "[2]", "no", "[1]", "yes"]
    assert [" ".join(line) for line in lines[3:]] == ["[1] no GPU", "[2] no core"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["info", "--nonsense"], "fasttfm info: error: unrecognized arguments: --nonsense\n"),
        (["pretrain", "bert", "--step-s=3"], "unrecognized arguments: --step-s=3; did you mean --steps?\n"),
    ],
)
def test_a_wrong_argument_exits_with_2_and_a_message(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_without_a_command_the_most_common_ones_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    commands = [line.split()[1] for line in printed.splitlines() if line.startswith("  fasttfm ")]
    assert commands == ["doctor", "embed", "finetune", "predict", "pretrain"]
    assert set(commands) <= COMMANDS.keys()


def test_doctor_is_info_and_selftest_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.selftest, "all_specs", lambda: {"layer_norm": SPECS["layer_norm"]})
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(info.report())
    assert re.search(r"^layer_norm .* float32 ok", printed, re.MULTILINE)
    assert "\nwhat to do" in printed
    monkeypatch.setattr(doctor.selftest, "check", lambda *call: "WRONG: far off")
    assert main(["doctor"]) == 1
    assert "a kernel's results are wrong: reinstall" in capsys.readouterr().out


def test_advice_lists_what_is_missing() -> None:
    verdict = [("partly fast", "kernels on the CPU"), ("to do", "install this")]
    assert doctor.advice(verdict, passed=True) == "what to do\n  install this"
    assert doctor.advice(verdict[:1], passed=True).startswith("what to do: nothing")


@pytest.mark.parametrize("arguments", [["--help"], ["info", "--help"], ["bench", "--help"], ["--version"]])
def test_help_and_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert "fasttfm" in capsys.readouterr().out


def test_no_description_has_a_broken_line() -> None:
    """A line of one or two letters is left over where a longer line was broken."""
    descriptions = [importlib.import_module(module).__doc__ or "" for module in COMMANDS.values()]
    lines = [line.strip() for text in descriptions for line in text.splitlines()]
    assert not [line for line in lines if 0 < len(line) < 3]
