"""python/fasttfm/_C.pyi against the module that it describes: the same functions, parameters and attributes."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

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
    found = {name: value for name, value in vars(_C).items() if isinstance(value, type)}
    assert found
    assert {name: value.__base__.__name__ for name, value in found.items()} == {
        name: base for name, base in declared.items() if not name.startswith("_")
    }
    for node in classes:
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        assert methods == {name for name in vars(found[node.name]) if not name.startswith("_")}


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
