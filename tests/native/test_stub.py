"""python/fasttfm/_C.pyi against the module that it describes: the same functions, parameters and attributes."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fasttfm
from fasttfm import _C

STUB = Path(fasttfm.__file__).with_name("_C.pyi")


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


make_stub = load_tool("make_stub")


def test_functions_agree() -> None:
    text = STUB.read_text()
    assert make_stub.stub(text, _C) == text, "run tools/make_stub.py"


def test_attributes_agree() -> None:
    tree = ast.parse(STUB.read_text())
    declared = {node.target.id: node.annotation.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    found = {name: type(getattr(_C, name)).__name__ for name in dir(_C) if not name.startswith("_")}
    assert declared == {name: kind for name, kind in found.items() if kind in ("str", "int")}


def test_classes_agree() -> None:
    classes = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)]
    declared = {node.name: node.bases[0].id if node.bases else "pybind11_object" for node in classes}
    structs = {node.name for node in classes if node.bases and node.bases[0].id == "NamedTuple"}
    assert structs == {name for name, value in vars(_C).items() if hasattr(value, "_fields")}
    classes = [node for node in classes if node.name not in structs]
    declared = {name: base for name, base in declared.items() if name not in structs}
    found = {name: value for name, value in vars(_C).items() if isinstance(value, type) and name not in structs}
    assert found
    assert {name: value.__base__.__name__ for name, value in found.items()} == {
        name: base for name, base in declared.items() if not name.startswith("_")
    }
    for node in classes:
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        assert methods == {name for name in vars(found[node.name]) if not name.startswith("_")}


MOST_PARAMETERS = 16
# Functions that still have more: those of whole layers, which pass their sizes one by one.
LARGE = {
    *("dropout_add_layer_norm_fp8_cuda", "few_rows_gemm_cuda"),
    *("knowledge_block_backward", "knowledge_block_forward", "knowledge_block_sizes_cpu", "knowledge_block_sizes_cuda"),
}


def large_functions(text: str) -> set[str]:
    """The functions of a stub that have too many parameters."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if len(node.args.posonlyargs + node.args.args) > MOST_PARAMETERS}


def test_parameters_that_belong_together_are_a_struct() -> None:
    assert large_functions(STUB.read_text()) == LARGE
    parameters = ", ".join(f"x{index}: int" for index in range(MOST_PARAMETERS + 1))
    assert large_functions(f"def scale({parameters}, /) -> None: ...") == {"scale"}


def test_a_struct_has_one_value_for_each_field() -> None:
    q = torch.zeros(1, 2, 1, 16)
    problem = _C.AttentionProblem(*(None,) * 5, 2, 2, -1, -1, 1.0, 0, 1.0)
    out = torch.ones_like(q)
    _C.attention_forward(q, q, q, problem, out, None, None)
    assert not out.any()
    for wrong, got in ((problem[:-1], "11"), (None, "None"), ([*problem], r"\[None")):
        with pytest.raises(TypeError, match=f"^attention_forward: problem: expected the 12 fields of .*, got {got}"):
            _C.attention_forward(q, q, q, wrong, out, None, None)
    with pytest.raises(TypeError, match=r"^attention_forward: problem\.scale: expected a number, got 'one'"):
        _C.attention_forward(q, q, q, problem._replace(scale="one"), out, None, None)


def test_a_missing_parameter_is_detected() -> None:
    text = STUB.read_text()
    for parameter in ("threads: int, ", "eps: float, "):
        shorter = text.replace(parameter, "", 1)
        assert shorter != text
        assert make_stub.stub(shorter, _C) == text


def test_functions_of_other_builds_stay() -> None:
    text = f"def by_hand() -> int: ...\n{make_stub.MARK}\n# fmt: off\n\ndef scale_cuda(x: int, /) -> None: ...\n"
    core = ModuleType("core")
    core.cuda_archs = ""
    assert make_stub.stub(text, core) == text
    core.cuda_archs = "80 90a"
    assert "scale_cuda" not in make_stub.stub(text, core)
