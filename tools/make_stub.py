"""Writes the functions of the native core into python/fasttfm/_C.pyi: ``python tools/make_stub.py``.

The head of the stub, up to the line that names this file, is written by hand. Everything after it comes from the
docstrings of a built core (csrc/calls.cpp writes them). Functions that this build does not have, because it has no CUDA
or no kernels for Hopper, keep their present definitions.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import ModuleType

STUB = Path(__file__).resolve().parent.parent / "python" / "fasttfm" / "_C.pyi"
MARK = "# ---- written by tools/make_stub.py "


def functions(core: ModuleType) -> dict[str, str]:
    """The definition of every function of the core."""
    functions = {name: getattr(core, name) for name in dir(core) if not name.startswith("_")}
    return {
        name: definition(function.__doc__)
        for name, function in functions.items()
        if callable(function) and not isinstance(function, type)
    }


def structs(core: ModuleType) -> list[str]:
    """The named tuples of the core, whose docstrings have the types of the fields."""
    structs = [value for name, value in sorted(vars(core).items()) if hasattr(value, "_fields")]
    return [
        f"class {struct.__name__}(NamedTuple):\n    "
        + struct.__doc__.partition("(")[2][:-1].replace(", ", "\n    ")
        + "\n"
        for struct in structs
    ]


def definition(doc: str) -> str:
    signature = doc.partition("\n")[0].replace("typing.SupportsInt | typing.SupportsIndex", "int")
    signature = signature.replace("typing.SupportsInt", "int").replace("types.ModuleType", "ModuleType")
    whole = re.sub(r"(?<![,]) ", "\N{NO-BREAK SPACE}", f"def {signature}: ...")  # lines end after commas
    lines = textwrap.wrap(whole, 120, subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def written(text: str) -> dict[str, str]:
    """The definitions that the stub has after the mark."""
    definitions = re.finditer(r"^def (\w+)\(.*?: \.\.\.$", text.partition(MARK)[2], re.DOTALL | re.MULTILINE)
    return {match[1]: match[0] for match in definitions}


def stub(text: str, core: ModuleType) -> str:
    """The text of the stub with the functions of the core."""
    head, mark, rest = text.partition(MARK)
    by_hand = set(re.findall(r"^def (\w+)", head, re.MULTILINE))
    complete = "90a" in core.cuda_archs.split()
    definitions = {} if complete else {name: kept for name, kept in written(text).items() if name.endswith("_cuda")}
    definitions |= {name: now for name, now in functions(core).items() if name not in by_hand}
    lines = [definitions[name] for name in sorted(definitions)]
    return "\n".join([head + mark + rest.partition("\n")[0], "# fmt: off", "", *structs(core), *lines, ""])


if __name__ == "__main__":
    from fasttfm import _C

    STUB.write_text(stub(STUB.read_text(), _C))
