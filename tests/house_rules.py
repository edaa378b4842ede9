"""The house rules: each is a function that returns its violations as sentences. test_house.py applies them."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
MAX_ARGUMENTS = 8
FOREIGN_SIGNATURES = "python/fasttfm/flash_attn.py"  # the signatures of FlashAttention, which a test compares
MAX_LAUNCHER_ARGUMENTS = 12

# ---- files of an op, all with the same stem --------------------------------------------------------------------------
FILES_OF_AN_OP = (
    "kernels/{op}/reference.py",
    "python/fasttfm/ops/{op}.py",
    "python/fasttfm/testing/specs/{op}.py",
    "tests/ops/test_{op}.py",
    "docs/ops/{op}.md",
)
# Files in those folders that belong to no op: shared code, and the layers that are composed of ops.
SHARED = {
    "python/fasttfm/ops/": {
        *("__init__", "attention_checks", "attention_choice", "attention_native", "packed_linear"),
        *("embedding_native", "gelu_gemm", "int8_linear"),
        *("linear", "vocabulary"),
    },
    "kernels/": {"fp8", "transformer_block"},
    "tests/ops/test_": {
        *("packed_linear", "int8_linear"),
    },
}
# Folders of kernels/ that belong to no op: code that all ops share, and code of the losses over a vocabulary.
SHARED_KERNELS = ("common", "vocabulary")
# problem.py has the options of a call, if there are many; tuning.py and triton_<part>.py are parts of triton.py.
KERNEL_FILES = {"reference.py", "problem.py", "triton.py", "tuning.py", "op.h", "cpu.cpp", "cuda.cu"}
PARTS = re.compile(r"triton_[a-z_]+\.py|cuda_[a-z_]+\.cu")
HEADERS = {".h", ".cuh"}


def ops_found(root: Path) -> dict[str, set[str]]:
    """Every op that has one of FILES_OF_AN_OP, with those that it has."""
    found: dict[str, set[str]] = {}
    for pattern in FILES_OF_AN_OP:
        prefix, suffix = pattern.split("{op}")
        for path in root.glob(pattern.replace("{op}", "*")):
            stem = path.relative_to(root).as_posix().removeprefix(prefix).removesuffix(suffix)
            if not stem.startswith("__") and stem not in SHARED.get(prefix, ()):
                found.setdefault(stem, set()).add(pattern)
    return found


def missing_files(root: Path) -> list[str]:
    return [
        f"{op}: there is no {pattern.format(op=op)}"
        for op, present in sorted(ops_found(root).items())
        for pattern in FILES_OF_AN_OP
        if pattern not in present
    ]


def stray_kernel_files(root: Path) -> list[str]:
    """Files in an op's folder that are neither KERNEL_FILES, nor parts of one, nor headers."""
    return [
        f"{path.relative_to(root)}: expected {', '.join(sorted(KERNEL_FILES))} or a header"
        for path in sorted(root.glob("kernels/*/*"))
        if path.is_file() and path.parent.name not in (*SHARED_KERNELS, "__pycache__")
        if path.name not in KERNEL_FILES and path.suffix not in HEADERS and not PARTS.fullmatch(path.name)
    ]


# ---- C++ includes ----------------------------------------------------------------------------------------------------


def forbidden_includes(path: str, text: str) -> list[str]:
    """torch headers nowhere; Python only in csrc/."""
    forbidden = "torch|ATen|c10|caffe2" + ("" if path.startswith("csrc/") else r"|pybind11|Python\.h")
    pattern = re.compile(rf'^\s*#\s*include\s*[<"](?:{forbidden})\b.*$', re.MULTILINE)
    return [f"{path}: {found.strip()}" for found in pattern.findall(text)]


def anonymous_namespaces(path: str, text: str) -> list[str]:
    """A header has no anonymous namespace: every file that includes it would get its own copy of the types in it."""
    if not path.endswith((".h", ".cuh")):
        return []
    return [f"{path}: anonymous namespace in a header"] * len(re.findall(r"^\s*namespace\s*\{", text, re.MULTILINE))


# ---- layers of the package: the direction of imports -----------------------------------------------------------------

# A layer is a module or package directly under fasttfm; `fasttfm` is the package's own __init__, `peers` is
# bench/peers.py, with which specs build their peers, and `seams` is testing/seams, which calls all of the package.
# FOUNDATIONS import nothing of fasttfm, and all layers may import
# them.
FOUNDATIONS = {"_gpus", "_version", "_atomic_files", "_extras", "_fonts", "_progress"}
_WORK = {"ops", "nn", "models", "train", "data", "generate"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": {"kernels", "_native"},
    "_native": {"_C"},
    "ops": {"ops", "kernels", "_native"},
    "optim": {"ops", "_native"},
    "nn": {"nn", "ops"},
    "models": {"models", "nn", "ops"},
    "flash_attn": {"ops"},
    "patching": {"patching", "flash_attn", "models", "nn", "ops"},
    "train": {"optim", *_WORK},
    "data": _WORK,
    "generate": _WORK,
    "inference": {"inference", "data", "models", "nn", "ops", "_native"},
    "tasks": {"tasks", "inference", *_WORK},
    "serve": {"serve", "tasks", "inference", "data", "generate", "models"},
    "peers": set(),
    "testing": {"testing", "peers", "nn", "ops", "kernels", "_native"},
    "seams": {"seams", "testing", "inference", "patching", "optim", "kernels", "_native", "fasttfm", *_WORK},
    "bench": {"bench", "peers", "testing", "ops"},
    "cli": {"cli", "selftest", "serve", "tasks", "inference", "testing", "bench", "_native", *_WORK},
    "__main__": {"cli"},
    "selftest": {"ops", "testing"},
    "fasttfm": {"flash_attn", "inference", "optim", "patching", "tasks", "testing", *_WORK},
    **{layer: set() for layer in FOUNDATIONS},
}


def backward_imports(module: str, text: str) -> list[str]:
    """Imports of ``module`` that MAY_IMPORT does not allow."""
    layer = layer_of(module)
    if layer not in MAY_IMPORT:
        return [f"{module}: {layer!r} is not in MAY_IMPORT"]
    violations = []
    for imported in fasttfm_imports(module, text):
        target = layer_of(imported)
        if target in FOUNDATIONS or (target in MAY_IMPORT[layer] and not _crosses_implementations(module, imported)):
            continue
        violations.append(f"{module}: must not import {imported}")
    return violations


def import_cycle(texts: Mapping[str, str]) -> list[str]:
    """A cycle of modules, each of which imports the previous one; empty if there is none.

    Imports inside functions count: they hide a cycle, but do not remove it.
    """
    graph: dict[str, set[str]] = {module: set() for module in texts}
    for module, text in texts.items():
        graph[module] = {imported for imported in fasttfm_imports(module, text, texts) if imported in texts}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def layer_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return "fasttfm"
    if parts[1:3] == ["testing", "seams"]:
        return "seams"
    return "peers" if parts[1:] == ["bench", "peers"] else parts[1]


def _crosses_implementations(module: str, imported: str) -> bool:
    """Whether a kernel imports another op's kernels or a reference, or an op imports another op's kernels. An op's
    files of native calls and of the selection of a backend count as the op."""
    parts, target = module.split("."), imported.split(".")
    if target[:2] != ["fasttfm", "kernels"] or layer_of(module) in ("testing", "seams"):
        return False
    if layer_of(module) == "kernels" and target[-1] == "reference":
        return True
    own = re.sub("_(native|choice)$", "", parts[2]) if len(parts) > 2 else None
    return target[2] not in (*SHARED_KERNELS, own)


def fasttfm_imports(module: str, text: str, known: Collection[str] = ()) -> Iterator[str]:
    """Every module of fasttfm that ``text`` imports, at its top or inside functions, relative imports resolved.
    ``from package import name`` imports a module if it is ``known``, otherwise the package's __init__."""
    for node in _import_statements(text):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            full = [f"{source}.{name}" for name in names]
            names = [name if name in known or _is_package(source) else source for name in full]
        yield from (name for name in names if name.split(".")[0] == "fasttfm")


@functools.cache  # two rules read the imports of every module
def _import_statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def _is_package(module: str) -> bool:
    """Whether ``from module import name`` names a module: true of fasttfm itself and of folders of kernels."""
    return module == "fasttfm" or re.fullmatch(r"fasttfm\.kernels(\.\w+|\.common\.triton)?", module) is not None


# ---- registries ------------------------------------------------------------------------------------------------------

MOST_LISTED = 2  # names of a registry in one literal: two may be a special case, more are a duplicate list


def second_lists(path: str, text: str, *registries: Collection[str]) -> list[str]:
    """Tuples, lists, sets and dictionaries that repeat names of a registry."""
    violations = []
    for node in ast.walk(ast.parse(text)):
        elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        constants = {each.value for each in elements if isinstance(each, ast.Constant)}
        for names in registries:
            found = constants & set(names)
            if len(found) > MOST_LISTED:
                listed = ", ".join(sorted(map(str, found)))
                violations.append(f"{path}:{node.lineno}: lists {listed}, which FAMILIES or TASKS has")
    return violations


# ---- sizes -----------------------------------------------------------------------------------------------------------


def long_file(path: str, text: str) -> list[str]:
    lines = len(text.splitlines())
    return [f"{path}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def long_python_functions(path: str, text: str) -> list[str]:
    violations = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = MAX_KERNEL_LINES if _is_triton_kernel(node) else MAX_FUNCTION_LINES
            if lines > limit:
                violations.append(f"{path}: {node.name} has {lines} lines, at most {limit}")
    return violations


def many_arguments(path: str, text: str) -> list[str]:
    """Public functions and methods with too many positional-or-keyword arguments; keyword-only ones do not count."""
    if path == FOREIGN_SIGNATURES:
        return []
    limit = MAX_LAUNCHER_ARGUMENTS if path.startswith("kernels/") else MAX_ARGUMENTS
    violations = []
    for node in _public_functions(ast.parse(text).body):
        arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        count = len([name for name in arguments if name not in ("self", "cls", "ctx")])
        if count > limit and not _is_triton_kernel(node):
            violations.append(f"{path}: {node.name} has {count} positional-or-keyword arguments, at most {limit}")
    return violations


def _public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if isinstance(node, ast.FunctionDef):
                yield node
            else:
                yield from _public_functions(node.body)


def _is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
    return any(ast.unparse(decorator) == "triton.jit" for decorator in decorators)


def undecorated_kernels(path: str, text: str) -> list[str]:
    """Triton kernels that Triton would launch: a function of triton.jit is a kernel if its name says so."""
    return [
        f"{path}: {node.name} lacks @launched_kernel"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and _is_triton_kernel(node)
        if "launched_kernel" not in map(ast.unparse, node.decorator_list)
    ]


def long_cpp_functions(path: str, text: str) -> list[str]:
    violations = []
    for header, lines in cpp_functions(text):
        limit = MAX_KERNEL_LINES if "__global__" in header else MAX_FUNCTION_LINES
        if lines > limit:
            violations.append(f"{path}: '{' '.join(header.split())[:80]}' has {lines} lines, at most {limit}")
    return violations


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """The header of every function body outside other functions, and its lines from header to closing brace.

    Reads braces, not C++: a body is a brace after a parameter list. Comments, literals and preprocessor lines are
    blanked first.
    """
    code = _without_comments(text)
    scopes: list[tuple[str, int] | None] = []  # a function's header and first line; None for a namespace or class
    start = 0
    for found in re.finditer("[;{}]", code):
        position, character = found.start(), found[0]
        if character == "{":
            header = code[start:position]
            inside = any(scope is not None for scope in scopes)
            first = start + len(header) - len(header.lstrip())
            scopes.append((header, first) if not inside and _FUNCTION_HEADER.search(header) else None)
        elif character == "}" and scopes:
            closed = scopes.pop()
            if closed is not None:
                yield closed[0], code.count("\n", closed[1], position) + 1
        start = position + 1


_FUNCTION_HEADER = re.compile(r"\)\s*(const|noexcept|override|final|->[^;]*|:[^;]*|\s)*$")
_BLANKED = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def _without_comments(text: str) -> str:
    """The text with comments, literals and preprocessor lines blanked, so that line numbers stay."""
    return _BLANKED.sub(lambda found: "\n" * found[0].count("\n"), text)


# ---- torch's defaults ------------------------------------------------------------------------------------------------

_FLOATING = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "rand", "randn", "linspace", "eye", "normal"}
_INTEGERS = {"arange", "randint", "randperm"}  # int64 whatever torch's default dtype is
# Parameters follow torch's defaults, as those of torch's own modules do.
PARAMETERS = {
    "python/fasttfm/models/ernie_knowledge.py": {
        "nn.Parameter(torch.zeros(entities, vector_size), requires_grad=False)"
    },
    "python/fasttfm/models/vit.py": {
        "nn.Parameter(torch.zeros(pixels, width, 1, 1))",
        "nn.Parameter(torch.zeros(pixels))",
    },
}


def implicit_defaults(path: str, text: str) -> list[str]:
    """Tensors and generators of library code whose dtype or device would be torch's default, which its user may set."""
    if path.startswith(("python/fasttfm/testing/", "python/fasttfm/bench/")):
        return []
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    exempt = {id(node.args[0]) for node in calls if ast.unparse(node) in PARAMETERS.get(path, ())}
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)}: expected {' and '.join(absent)}"
        for node in calls
        if id(node) not in exempt and (absent := _absent_options(node))
    ]


def _absent_options(call: ast.Call) -> list[str]:
    module, _, name = ast.unparse(call.func).rpartition(".")
    options = {each.arg for each in call.keywords}
    if module != "torch" or None in options or "out" in options:  # None: those of a dictionary
        return []
    if name == "Generator":
        return [] if call.args or "device" in options else ["device"]
    required = ["dtype", "device"] if name in _FLOATING else ["device"] if name in _INTEGERS else []
    if name == "arange" and any(isinstance(each, ast.Constant) and isinstance(each.value, float) for each in call.args):
        required = ["dtype", "device"]
    return [each for each in required if each not in options]


# ---- the field's terms -----------------------------------------------------------------------------------------------

# Phrases that are not in the PTX, CUDA, PyTorch and Hugging Face documentation, and the term to use instead.
PHRASES = {
    r"copy engine": "TMA",
    r"matrix units?": "tensor cores",
    r"second[- ]level cache": "L2",
    r"vendor's": "cuBLAS, or torch's",
    r"at (its|their) word": "not validated",
    r"(masked|next|padding) words?": "tokens",
    r"(?<!--)held[- ]out": "validation",
    r"(to be )?judged by": "dev set",
    r"nobody": "the passive: not requested, not validated",
    r"of (before|now)": "the present tense, without history",
    r"what is so": "what it is",
    r"(is|are|was|were) told": "gets, or is passed",
    r"so many": "this many, or the number of",
    r"likeliest": "most likely",
    r"names? out of": "a key of, or one of",
    r"tabulators?": "tab",
    r"serve[sd]? (?:\w+ )?calls?": "runs, or supports",
    r"waited for": "synchronized",
    r"(waits?|waiting) for nothing": "does not synchronize",
    r"anew": "again",
}
# Overused words. Tests may use them as names.
TICS = {
    r"alone": "only",
    r"behind": "after, or at the end of",
    r"besides?": "next to, in addition to, or with",
    r"stands?": "is, is stored, or comes",
}


def private_phrases(path: str, text: str) -> list[str]:
    """Uses of ``PHRASES`` and, outside of tests, of ``TICS``. The glossary of CONTRIBUTING.md may name them."""
    text = text.partition("\n## Vocabulary\n")[0] if path == "CONTRIBUTING.md" else text
    terms = PHRASES if path.startswith("tests/") else {**PHRASES, **TICS}
    if not _phrase("|".join(terms)).search(text):  # one search instead of one for each phrase
        return []
    return [
        f"{path}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}: expected {term}"
        for phrase, term in terms.items()
        for found in _phrase(phrase).finditer(text)
    ]


def _phrase(expression: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{expression})\b", re.IGNORECASE)
