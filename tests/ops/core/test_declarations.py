"""Every public op is declared (ops/core/declare.py), and every list of ops contains what is declared."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fasttfm import ops
from fasttfm.ops.core.backends import Backend
from fasttfm.ops.core.declare import DECLARED
from fasttfm.testing.specs import all_specs

ROOT = Path(__file__).parents[3]
PAGES = {"unpack": "pack"}  # the ops without a page and a spec of their own


def backends(name: str) -> dict[str, Backend]:
    return {backend.name: backend for backend in DECLARED[name].table.backends}


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the rows of the page's table with this head."""
    table = (ROOT / "docs" / page).read_text().partition(f"| {head} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_public_op_is_declared() -> None:
    assert set(all_specs()) == set(DECLARED) - set(PAGES)
    assert set(DECLARED) <= set(ops.__all__)


def test_only_declarations_register_ops() -> None:
    """A registered op has its schema and its fake implementation from a declaration. FP8 and the stack of layers choose
    among backends, and are no public ops."""
    users: dict[str, set[str]] = {"register": set(), "BackendTable": set()}
    for path in (ROOT / "python" / "fasttfm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in users:
                users[node.func.id].add(path.relative_to(ROOT / "python" / "fasttfm").as_posix())
    assert users["register"] == {"ops/core/declare.py"}
    assert users["BackendTable"] == {"ops/core/declare.py", "ops/fp8/casts.py"}


def test_the_overview_lists_the_backends_of_every_op() -> None:
    listed = {}
    for links, _, cpu, cuda, triton in rows("ops.md", "op | what it computes | cpu | cuda | triton"):
        pages = set(re.findall(r"\(ops/(\w+)\.md\)", links))
        for name in [name.strip() for text in re.findall(r"\[([\w, ]+)\]", links) for name in text.split(",")]:
            listed[name] = (cpu, cuda, triton)
            assert PAGES.get(name, name) in pages
    assert set(listed) == set(DECLARED)
    for name, (cpu, cuda, triton) in listed.items():
        has = backends(name)
        assert cpu == ("yes" if "cpu" in has else "torch's GEMM" if "torch" in has else ""), name
        assert bool(cuda) == ("cuda" in has), name
        assert triton == ("" if "triton" not in has else "by name" if has["triton"].by_name else "yes"), name


def test_the_table_of_accuracy_has_every_op() -> None:
    """tools/accuracy_table.py prints a row for each backend that runs on a CPU. What samples has no error."""
    expected = {(name, backend) for name in all_specs() for backend in ("cpu", "torch") if backend in backends(name)}
    listed = [(op, backend) for op, backend, *_ in rows("numerics.md", "op | backend | float32 | bfloat16 | float16")]
    assert sorted(listed) == sorted(expected - {("sample_tokens", "cpu")})


@pytest.mark.parametrize("name", ["__init__.py", "README.md"])
def test_the_kernel_for_the_hub_has_every_op(name: str) -> None:
    text = (ROOT / "tools" / "hub_kernel_files" / name).read_text()
    missing = [op for op in DECLARED if not re.search(rf"[`\"]{op}[`\"]", text)]
    assert not missing
