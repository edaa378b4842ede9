"""Rules for kernels: each is a function that returns its violations as sentences. test_kernel_rules.py applies them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

# ---- boundaries of packed sequences ----------------------------------------------------------------------------------

# The readers of boundaries, which clamp them. All other kernels get spans and positions from these.
BOUNDARY_READERS = ("kernels/common/packed.h", "kernels/common/triton/packed.py")
# Files that write boundaries, or have boundaries of something else.
OTHERS = {
    "kernels/pack/cuda_mask.cu": "computes cu_seqlens from a mask",
    "kernels/maxsim/triton.py": "the launcher computes the bounds of equal entries by searchsorted",
}
_BOUNDARIES = r"\w*(?:cu_seqlens|bounds|boundaries)\w*"
_COMMENT = re.compile(r"//[^\n]*")
# An element of boundaries, and a pointer to one: `p.cu_seqlens[i]`, `p.cu_seqlens + i`, `*p.cu_seqlens`.
_ELEMENT = re.compile(rf"\b{_BOUNDARIES}\s*(?:\[|\+)|[=(,!<>&|]\s*\*\s*(?:\w+(?:\.|->))?{_BOUNDARIES}\b")
# A pointer by a name that is not one of boundaries: `const int32_t* starts = p.cu_seqlens`.
_ALIAS = re.compile(rf"const int32_t\s*\*\s*(?!{_BOUNDARIES}\b)(\w+)\s*=[^;]*{_BOUNDARIES}")
_DECLARATION = re.compile(r"\s*(?:const )?int32_t\s*\*")


def boundary_reads(path: str, text: str) -> list[str]:
    """C++ and CUDA that read boundaries without common/packed.h."""
    if path in BOUNDARY_READERS or path in OTHERS:
        return []
    found = []
    for number, line in enumerate(_COMMENT.sub("", text).splitlines(), 1):
        read = "=" in line or not _DECLARATION.match(line) or "(" in line
        read = read and _ELEMENT.search(_DECLARATION.sub("", line))
        if read or _ALIAS.search(line):
            found.append(f"{path}:{number}: boundaries are read by common/packed.h: {line.strip()}")
    return found


def triton_boundary_reads(path: str, text: str) -> list[str]:
    """Triton kernels that load boundaries without common/triton/packed.py. ``lengths`` of dense sequences are not
    boundaries; attention's kernels call them bounds where the layout says so."""
    if path in BOUNDARY_READERS or path in OTHERS:
        return []
    found = []
    for kernel in kernels_of(text):
        for call in ast.walk(kernel):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("tl.load", "tl.make_block_ptr"):
                pointer = ast.unparse(call.args[0])
                if re.search(rf"\b{_BOUNDARIES}\b", pointer) and not _in_lengths_branch(kernel, call):
                    found.append(f"{path}:{call.lineno}: boundaries are read by common/triton/packed.py: {pointer}")
    return found


def _in_lengths_branch(kernel: ast.FunctionDef, call: ast.Call) -> bool:
    """Whether the call is inside of ``if LAYOUT == "lengths":``."""
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "LAYOUT == 'lengths'" and call in list(ast.walk(node))
        for node in ast.walk(kernel)
    )


def kernels_of(text: str) -> Iterator[ast.FunctionDef]:
    """The functions with a decorator of Triton."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
            if "triton.jit" in decorators:
                yield node


# ---- 64-bit offsets --------------------------------------------------------------------------------------------------

# Numbers of elements between rows, heads or sequences, or of a row. A product of one of them and an index may pass
# 2^31, so that one of the factors has 64 bits.
_STRIDE_NAMES = re.compile(
    r"^(?:\w+_)?strides?(?:_\w+)?$|^(?:q|k|v|dout|dq|dk|dv|bias|dbias)_(?:batch|row|head)$|^(?:C|columns|width)$"
)


def narrow_products(path: str, text: str, exceptions: dict[tuple[str, str], str]) -> list[str]:
    """Products of a stride, or of the elements of a row, with a 32-bit index in Triton kernels."""
    found = []
    for kernel in kernels_of(text):
        wide = _wide_names(kernel)
        for node in ast.walk(kernel):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                continue
            sides = (node.left, node.right)
            if not any(_is_stride(side) for side in sides):
                continue
            if any(_is_wide(side, wide) for side in sides) or all(_is_fixed(side) for side in sides):
                continue
            product = ast.unparse(node)
            if (path, product) not in exceptions:
                found.append(f"{path}:{node.lineno}: {kernel.name}: a 32-bit product: {product}")
    return found


def _is_stride(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name) and _STRIDE_NAMES.match(node.id) is not None


def _is_fixed(node: ast.expr) -> bool:
    """A stride or a constant: their product is one of the launcher's numbers."""
    name = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(node, ast.Constant) or _is_stride(node) or (isinstance(name, ast.Name) and name.id.isupper())


def _is_wide(node: ast.expr, wide: set[str]) -> bool:
    """Whether an expression has 64 bits: it contains a cast to them, or a name that has them."""
    if "tl.int64" in ast.unparse(node):
        return True
    return any(isinstance(each, ast.Name) and each.id in wide for each in ast.walk(node))


def _wide_names(kernel: ast.FunctionDef) -> set[str]:
    """Names that are assigned expressions of 64 bits, also by way of other such names."""
    wide: set[str] = set()
    assignments = [
        (name.id, node.value if isinstance(node, ast.Assign) else node.iter)
        for node in ast.walk(kernel)
        if isinstance(node, (ast.Assign, ast.For))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in (target.elts if isinstance(target, ast.Tuple) else [target])
        if isinstance(name, ast.Name)
    ]
    for _ in range(len(assignments)):
        more = {name for name, value in assignments if _is_wide(value, wide)}
        if more <= wide:
            break
        wide |= more
    return wide


# In C++, launchers' structs have 64-bit strides; a kernel may copy one into 32 bits.
_FIELD = re.compile(
    r"^\s+(?!int64_t|const|u?int\d*_t\s*\*|void)(\w+) (\w*(?:stride|columns|width)\w*)[;,]", re.MULTILINE
)
_NARROW_COPY = re.compile(r"\b(?:int|uint32_t|unsigned|auto) (\w*(?:stride|columns|width|pitch)\w*) ?[=,)]")


def narrow_fields(path: str, text: str) -> list[str]:
    """Strides and widths of fewer than 64 bits in the structs of a launcher (op.h)."""
    if not path.endswith("/op.h"):
        return []
    return [f"{path}: {name} is {kind}, expected int64_t" for kind, name in _FIELD.findall(text)]


def narrow_cpp_products(path: str, text: str, exceptions: dict[tuple[str, str], str]) -> list[str]:
    """Products of a stride that CUDA code has in 32 bits and a factor that is not declared as int64_t in the file."""
    code = _COMMENT.sub("", text)
    found = []
    for name in sorted(set(_NARROW_COPY.findall(code))):
        if re.search(rf"int64_t(?: \w+,)* {name}\b", code):
            continue  # also declared with 64 bits: the file has both
        for product in re.finditer(rf"([\w.\[\]]+) \* {name}\b|\b{name} \* ([\w.\[\]]+)", code):
            factor = re.sub(r"\[.*", "", (product[1] or product[2]).split(".")[-1])
            if factor.isdigit() or re.match(r"k[A-Z]", factor):
                continue
            if re.search(rf"int64_t[^;()]*\b{factor}\b", code) or (path, product[0]) in exceptions:
                continue
            found.append(f"{path}: a 32-bit product: {product[0]}")
    return found


# ---- grids -----------------------------------------------------------------------------------------------------------


def long_grids(path: str, text: str, exceptions: dict[tuple[str, str], str]) -> list[str]:
    """Launches of Triton kernels whose grid has a second or third dimension: it has at most 65,535 programs there."""
    found = []
    tree = ast.parse(text)
    grids = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
            continue
        kernel = ast.unparse(node.func.value)
        if "kernel" not in kernel:
            continue
        grid = node.func.slice
        grid = grids.get(grid.id, grid) if isinstance(grid, ast.Name) else grid
        for extent in grid.elts[1:] if isinstance(grid, ast.Tuple) else [grid]:
            if (path, ast.unparse(extent)) not in exceptions:
                found.append(f"{path}:{node.lineno}: {kernel}: a grid's y or z of {ast.unparse(extent)}")
    return found
