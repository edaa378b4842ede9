"""Creates or updates the virtual environment of the Makefile: ``python3 tools/environment.py .venv [purpose]``.

The purpose ``package`` (the default) builds and installs fasttfm with what its commands need, ``checks`` adds the tools
of tests, benchmarks and lint, and ``docs`` has only the tools of the documentation site, for which nothing is compiled.

It uses only the standard library and the syntax of Python 3.7, so that an old interpreter gets a clear message instead
of a syntax error.

If the interpreter's own torch sees a GPU, the environment uses system site packages and keeps that torch, Triton and
numpy; otherwise the versions in constraints.txt are installed, and without an NVIDIA driver the CPU build of torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ("setuptools", "cmake", "ninja", "pybind11")  # as [build-system] in pyproject.toml has them
BROUGHT_BY_TORCH = ("torch", "triton", "numpy")
DOCS_TOOLS = ("mkdocs-material", "mkdocstrings[python]", "ruff")  # as the extra docs of pyproject.toml has them
CPU_TORCH = "https://download.pytorch.org/whl/cpu"


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], *([purpose] for purpose in PURPOSES)):
        return fail(f"expected the environment's folder, and one of {', '.join(PURPOSES)}; got {' '.join(arguments)!r}")
    if sys.version_info < (3, 10):
        running = f"{sys.executable} is {sys.version.split()[0]}"
        return fail(f"fasttfm needs Python 3.10 or newer, {running}; name another one: make PYTHON=python3.12 ...")
    folder = Path(arguments[0]).resolve()
    python = folder / "bin" / "python"
    lay_over = sees_gpu(sys.executable)
    try:
        if not works(python):
            make_environment(folder, lay_over)
        PURPOSES[arguments[1] if len(arguments) == 2 else "package"](python, lay_over)
    except subprocess.CalledProcessError as error:
        return fail(f"this command failed with status {error.returncode}: {' '.join(error.cmd)}")
    return 0


def fail(reason: str) -> int:
    print(f"environment: {reason}", file=sys.stderr)
    return 1


def sees_gpu(python: str) -> bool:
    question = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", question], stderr=subprocess.DEVNULL).returncode == 0


def torch_index() -> list[str]:
    """Options of pip. Without an NVIDIA driver they add PyTorch's index of CPU builds. pip prefers its 2.13.0+cpu to
    PyPI's 2.13.0, which brings gigabytes of CUDA packages. If the index cannot be reached, pip continues without it."""
    if os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None:
        return []
    return ["--extra-index-url", CPU_TORCH, "--retries", "1", "--timeout", "30"]


def works(python: Path) -> bool:
    """Whether the environment's interpreter works. If the base Python was upgraded, it does not, and the environment is
    created again."""
    command = [str(python), "-m", "pip", "--version"]
    return python.exists() and subprocess.run(command, capture_output=True).returncode == 0


def make_environment(folder: Path, lay_over: bool) -> None:
    options = ["--clear", *(["--system-site-packages"] if lay_over else [])]
    print(f"environment: making {folder} with {sys.executable}{' and its own torch' if lay_over else ''}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", *options, str(folder)], check=True)


def install_package(python: Path, lay_over: bool) -> None:
    constraints = constraints_for(python, lay_over)
    pip(python, constraints, *BUILD_TOOLS)
    if not lay_over:
        # What torch needs comes with the package, from the usual index only.
        pip(python, constraints, *torch_index(), "--no-deps", "torch")
    pip(python, constraints, "--no-build-isolation", "--editable", f"{ROOT}[tasks]")


def install_checks(python: Path, lay_over: bool) -> None:
    pip(python, constraints_for(python, lay_over), "fasttfm[test,bench,dev]")  # the package itself is installed
    if subprocess.run([str(python), "-c", "import triton"], stderr=subprocess.DEVNULL).returncode != 0:
        pip(python, ROOT / "constraints.txt", "triton")


def install_docs(python: Path, lay_over: bool) -> None:
    pip(python, constraints_for(python, lay_over), *DOCS_TOOLS)


PURPOSES = {"package": install_package, "checks": install_checks, "docs": install_docs}


def constraints_for(python: Path, lay_over: bool) -> Path:
    """A GPU build of torch pins its own Triton, so Triton is installed only if torch did not install it."""
    return without(ROOT / "constraints.txt", BROUGHT_BY_TORCH if lay_over else ("triton",), python.parent.parent)


def without(constraints: Path, names: tuple[str, ...], folder: Path) -> Path:
    """A copy of the constraints in ``folder`` without ``names``."""
    lines = constraints.read_text().splitlines(keepends=True)
    kept = [line for line in lines if re.split(r"[=<>; ]", line)[0] not in names]
    copy = folder / "constraints.txt"
    copy.write_text("".join(kept))
    return copy


def pip(python: Path, constraints: Path, *arguments: str) -> None:
    print(f"environment: pip install {' '.join(arguments)}", flush=True)
    # Modules are compiled to bytecode when they are first imported: to compile all of torch's takes longer.
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "-c", str(constraints)]
    command = [str(python), "-m", "pip", "install", *options]
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])  # setup.py calls cmake and ninja
    # Objects are kept: after a change only the changed files are compiled.
    environment = {"FASTTFM_BUILD_DIR": str(ROOT / "build" / "core"), **os.environ, "PATH": path}
    subprocess.run([*command, *arguments], env=environment, check=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
