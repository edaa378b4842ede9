"""Writes the skeleton of an op: ``python tools/new_op.py NAME``.

The files under tools/op_skeleton/ make up a small op called "skeleton", with the reference as its only backend. They
are copied to the same places in the tree with the new name in it, the op is exported from fasttfm.ops, and its page is
listed in the documentation. All its tests pass as written; CONTRIBUTING.md describes the next steps.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKELETON = Path(__file__).resolve().parent / "op_skeleton"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the skeleton of an op, whose tests pass as written.")
    parser.add_argument("name", help="lower-case words joined by underscores, for example rotary_embedding")
    name = parser.parse_args(arguments).name
    refusal = refuse_name(name, ROOT)
    if refusal is not None:
        print(f"new_op: name: {refusal}", file=sys.stderr)
        return 2
    for path in write_op(name, ROOT):
        print(path.relative_to(ROOT))
    print(f"\nNext: pytest tests/ops/test_{name}.py, then the formula in kernels/{name}/reference.py")
    return 0


def refuse_name(name: str, root: Path) -> str | None:
    """Why there can be no new op of this name; None if there can."""
    if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) is None or keyword.iskeyword(name):
        return f"expected lower-case words joined by underscores, got {name!r}"
    files = targets(name, root)
    taken = [path for file in files for path in (file, file.with_suffix("")) if path.exists()]  # or a package
    if name in ("common", "skeleton") or taken:
        where = taken[0].relative_to(root) if taken else "the tree's own names"
        return f"expected a new name, got {name!r}, which {where} has already"
    return None


def targets(name: str, root: Path) -> list[Path]:
    """The paths of the op's files, in the order of the skeleton's."""
    return [root / renamed(path.relative_to(SKELETON).as_posix(), name) for path in skeleton_files()]


def skeleton_files() -> list[Path]:
    return sorted(path for path in SKELETON.rglob("*") if path.suffix in (".py", ".md"))


def renamed(text: str, name: str) -> str:
    camel = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("skeleton", name).replace("Skeleton", camel)


def write_op(name: str, root: Path) -> list[Path]:
    """Writes the op's files, exports and lists it, and returns every path that was written."""
    written = targets(name, root)
    for source, target in zip(skeleton_files(), written, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(source.read_text(), name))
    lists = {"python/fasttfm/ops/__init__.py": with_export, "docs/api/ops.md": with_entry, "mkdocs.yml": with_page}
    for path, change in lists.items():
        (root / path).write_text(change((root / path).read_text(), name))
    return [*written, *(root / path for path in lists)]


def with_export(text: str, name: str) -> str:
    """``ops/__init__.py`` with one more op: an import, and a name in ``__all__``, each in its order."""
    imports = re.findall(r"^from fasttfm\.ops\.\w+ import (?:\([^)]*\)|.+)\n", text, re.MULTILINE)
    exported = re.search(r"^__all__ = \[(.*?)\]\n", text, re.MULTILINE | re.DOTALL)
    if not imports or exported is None:
        raise SystemExit("new_op: python/fasttfm/ops/__init__.py: expected imports in a row and a list __all__")
    block = "".join(sorted([*imports, f"from fasttfm.ops.{name} import {name}\n"]))
    names = sorted([*re.findall(r'"(\w+)"', exported[1]), name])
    lines = "".join(f'    "{item}",\n' for item in names)
    one_line = "__all__ = [" + ", ".join(f'"{item}"' for item in names) + "]\n"
    text = text.replace(exported[0], one_line if len(one_line) <= 121 else f"__all__ = [\n{lines}]\n")
    return text.replace("".join(imports), block)


def with_entry(text: str, name: str) -> str:
    """``docs/api/ops.md`` with one more op, before the first op whose name follows it."""
    entries = re.findall(r"^::: (?:\w+\.)+(\w+)\n", text, re.MULTILINE)
    entry = f"::: fasttfm.ops.{name}.{name}\n"
    following = next((other for other in entries if other.islower() and other > name), None)
    pattern = rf"^::: (?:\w+\.)+{following}\n" if following else r"^## "
    return re.sub(pattern, lambda match: f"{entry}\n{match[0]}", text, count=1, flags=re.MULTILINE)


def with_page(text: str, name: str) -> str:
    """``mkdocs.yml`` with one more page, after those of the other ops."""
    last = re.findall(r"^ +- .*: ops/\w+\.md\n", text, re.MULTILINE)[-1]
    return text.replace(last, f"{last}{last.partition('-')[0]}- {name}: ops/{name}.md\n")


if __name__ == "__main__":
    raise SystemExit(main())
