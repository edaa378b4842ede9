"""python/fasttfm/_C.pyi against the module it describes: the same functions, the same fields, the same attributes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fasttfm
from fasttfm import _C

STUB = Path(fasttfm.__file__).with_name("_C.pyi")

# Compiled where 90a is among the architectures.
HOPPER_ALONE = (
    "attention_forward_cuda",
    "attention_backward_workspace_cuda",
    "attention_column_parts_cuda",
    "attention_backward_cuda",
    "gelu_product_workspace_cuda",
    "gelu_product_forward_cuda",
    "gelu_product_backward_cuda",
    "transformer_block_sizes_cuda",
    "transformer_block_forward_cuda",
    "transformer_block_backward_cuda",
)

Signatures = dict[str, list[str]]


def stub_signatures(text: str) -> Signatures:
    """Each function's arguments; for a launcher, the fields of its TypedDict. Private names are the stub's own."""
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> list[str]:
        inherited = [field for base in classes[name].bases if base.id != "TypedDict" for field in fields(base.id)]
        return inherited + [item.target.id for item in classes[name].body if isinstance(item, ast.AnnAssign)]

    signatures = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
            signatures[node.name] = sorted(fields(node.args.kwarg.annotation.slice.id))
        elif isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *filter(None, [node.args.vararg])]
            signatures[node.name] = [argument.arg for argument in arguments]
    return signatures


def module_signatures() -> Signatures:
    """The same, from the docstrings that pybind11 and bind_launcher (csrc/binding.h) write."""
    signatures = {}
    for name in dir(_C):
        function = getattr(_C, name)
        if name.startswith("_") or not callable(function) or isinstance(function, type):
            continue
        fields = re.search(r"^fields:(.*)$", function.__doc__, re.MULTILINE)
        if fields is not None:
            signatures[name] = sorted(fields[1].split())
        else:
            signatures[name] = re.findall(r"(\w+):", function.__doc__.partition("->")[0])
    return signatures


def test_functions_and_fields_agree() -> None:
    declared = stub_signatures(STUB.read_text())
    if _C.cuda_version == 0:
        declared = {name: fields for name, fields in declared.items() if not name.endswith("_cuda")}
    elif "90a" not in _C.cuda_archs.split():
        declared = {name: fields for name, fields in declared.items() if name not in HOPPER_ALONE}
    assert declared == module_signatures()


def test_attributes_agree() -> None:
    tree = ast.parse(STUB.read_text())
    declared = {node.target.id: node.annotation.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    found = {name: type(getattr(_C, name)).__name__ for name in dir(_C) if not name.startswith("_")}
    assert declared == {name: kind for name, kind in found.items() if kind in ("str", "int")}


def test_exceptions_agree() -> None:
    tree = ast.parse(STUB.read_text())
    declared = {node.name: node.bases[0].id for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {name: value for name, value in vars(_C).items() if isinstance(value, type)}
    assert found
    assert {name: value.__base__.__name__ for name, value in found.items()} == {
        name: base for name, base in declared.items() if not name.startswith("_")
    }


def test_a_forgotten_field_shows() -> None:
    text = STUB.read_text()
    assert stub_signatures(text.replace("    rows: int\n", "", 1)) != stub_signatures(text)
