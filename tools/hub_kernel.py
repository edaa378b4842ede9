"""Writes the folder that Hugging Face's ``kernels`` loads: ``python tools/hub_kernel.py FOLDER`` (`make hub-kernel`).

The folder has a variant for each backend, ``build/torch-cpu`` and ``build/torch-cuda``, both with the same files: the
ops, their reference and Triton kernels and FlashAttention's functions, a subset of fasttfm that imports only torch,
Triton and the standard library. Several versions of a kernel can be loaded into one process: imports are made relative,
and the torch ops are registered in a namespace of the variant.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / "tools" / "hub_kernel_files"
NAME = "fasttfm"
VERSION = 1  # of the functions and layers; incremented by changes that break callers
BACKENDS = ("cpu", "cuda")
_MODULES = ("_gpus.py", "_native.py", "flash_attn.py", "ops")
_IMPORT = re.compile(r"^([ \t]*)from fasttfm(\.[\w.]+)? import ", re.MULTILINE)
_NAMESPACE = re.compile(r'^NAMESPACE = "fasttfm".*$', re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("hub_kernel: expected one argument, the folder to write", file=sys.stderr)
        return 2
    write(Path(arguments[0]))
    print(arguments[0])
    return 0


def write(folder: Path) -> None:
    """Writes the folder, and replaces a build in it."""
    files = sources()
    texts = "".join(f"{path}\n{text}" for path, text in sorted(files.items()))
    digest = hashlib.sha256(texts.encode()).hexdigest()[:10]
    shutil.rmtree(folder / "build", ignore_errors=True)
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        identifier = f"_{NAME}_{backend}_{digest}"
        for path, text in files.items():
            target = variant / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(in_namespace(text, identifier), encoding="utf-8")
        metadata = {
            "name": NAME,
            "id": identifier,
            "version": VERSION,
            "license": "apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    shutil.copy(OWN / "README.md", folder / "README.md")


def sources() -> dict[str, str]:
    """The files of a variant by their paths in it, with relative imports."""
    files = {}
    for name in _MODULES:
        start = ROOT / "python" / "fasttfm" / name
        for path in [start] if start.is_file() else start.rglob("*.py"):
            files[path.relative_to(ROOT / "python" / "fasttfm").as_posix()] = path
    for path in (ROOT / "kernels").rglob("*.py"):
        files[f"kernels/{path.relative_to(ROOT / 'kernels').as_posix()}"] = path
    files.update((path.name, path) for path in OWN.glob("*.py"))
    return {name: with_relative_imports(name, path.read_text(encoding="utf-8")) for name, path in files.items()}


def with_relative_imports(path: str, text: str) -> str:
    """A file's text, with imports from fasttfm made relative to its folder."""
    dots = "." * (1 + path.count("/"))
    return _IMPORT.sub(lambda match: f"{match[1]}from {dots}{(match[2] or '')[1:]} import ", text)


def in_namespace(text: str, identifier: str) -> str:
    return _NAMESPACE.sub(f'NAMESPACE = "{identifier}"', text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
