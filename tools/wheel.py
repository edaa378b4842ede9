"""Builds and tests what a release uploads: ``python tools/wheel.py sdist|build|repair|test|release|version``. The
Makefile calls it.

There is a wheel for each Python, with the whole native core. Only the bindings in csrc/ depend on Python; all builds
share the other objects in ``FASTTFM_BUILD_DIR``. ``release`` builds and tests a wheel for each ``--python``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from environment import torch_index, without

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = ROOT / "build" / "release"
THIS = Path(sys.executable)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/wheel.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("sdist", "writes the source distribution"),
        ("build", "builds a wheel for this Python"),
        ("release", "builds a wheel for each --python, installs it into an empty environment and checks it there"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--output", type=Path, default=ROOT / "dist")
    command.add_argument("--python", action="append", metavar="PATH", help="default: this Python")
    command.add_argument("--torch", metavar="VERSION", help="default: as in constraints.txt")
    repair_parser = commands.add_parser("repair", help="strips a wheel and gives it its manylinux tag")
    repair_parser.add_argument("wheel", type=Path)
    repair_parser.add_argument("output", type=Path)
    test_parser = commands.add_parser("test", help="installs a wheel into an empty environment and checks it there")
    test_parser.add_argument("wheel", type=Path)
    test_parser.add_argument("--torch", metavar="VERSION", help="default: as in constraints.txt")
    test_parser.add_argument("--environment", type=Path, default=ROOT / "build" / "wheel-test")
    version_parser = commands.add_parser("version", help="fails if a tag is not v and the package's version")
    version_parser.add_argument("tag")
    options = parser.parse_args(arguments)
    if options.command == "sdist":
        sdist(options.output)
    elif options.command == "build":
        build(options.output)
    elif options.command == "release":
        release(options.python or [sys.executable], options.torch, options.output)
    elif options.command == "repair":
        repair(options.wheel, options.output)
    elif options.command == "test":
        install_and_check(options.wheel, options.torch, options.environment, THIS)
    else:
        return check_tag(options.tag)
    return 0


def run(*command: str | Path, **variables: str) -> None:
    path = os.pathsep.join([str(THIS.parent), os.environ.get("PATH", "")])
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "PATH": path, **variables})


def sdist(output: Path) -> None:
    run(sys.executable, ROOT / "setup.py", "--quiet", "sdist", "--dist-dir", output.resolve())


def release(pythons: Sequence[str], torch: str | None, output: Path) -> None:
    for python in map(Path, pythons):
        install_and_check(build(output, python), torch, ROOT / "build" / "wheel-test", python)


def build(output: Path, python: Path = THIS) -> Path:
    """Builds, repairs and describes a wheel for a Python. The build tools are those of this Python; for another Python,
    pip installs their tested versions into an isolated environment."""
    raw = OBJECTS / "wheels"
    for old in raw.glob("*.whl"):
        old.unlink()
    options, variables = ["--no-deps", "--wheel-dir", str(raw)], {}
    variables["FASTTFM_BUILD_DIR"] = os.environ.get("FASTTFM_BUILD_DIR", str(OBJECTS / "core"))
    if python == THIS:
        options.append("--no-build-isolation")  # with which pip refuses constraints of the build
    else:
        names = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")  # before pip 25.3, and since
        variables.update(dict.fromkeys(names, str(ROOT / "constraints.txt")))
    run(python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", *options, ROOT, **variables)
    (raw_wheel,) = raw.glob("*.whl")
    wheel = repair(raw_wheel, output)
    print(describe(wheel), flush=True)
    return wheel


def repair(wheel: Path, output: Path) -> Path:
    """Gives the wheel the oldest manylinux tag that the libraries and symbols in use allow (auditwheel). No library is
    copied into the wheel and none needs to be excluded: the CUDA runtime is linked statically, and the driver,
    cuBLASLt, the BLAS and the OpenMP runtime of torch are found in the process."""
    before = set(output.glob("*.whl")) if output.exists() else set()
    run(sys.executable, "-m", "auditwheel", "repair", "--strip", "--wheel-dir", output, wheel)
    made = sorted(set(output.glob("*.whl")) - before, key=lambda path: path.stat().st_mtime)
    return made[-1] if made else max(before, key=lambda path: path.stat().st_mtime)


def describe(wheel: Path) -> str:
    """Name, size and the largest files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        largest = sorted(archive.infolist(), key=lambda member: -member.compress_size)[:3]
    lines = [f"{wheel}: {megabytes(wheel.stat().st_size)}"]
    for member in largest:
        lines.append(f"  {member.filename}: {megabytes(member.compress_size)}, unpacked {megabytes(member.file_size)}")
    return "\n".join(lines)


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def install_and_check(wheel: Path, torch: str | None, folder: Path, base: Path) -> None:
    """Installs the wheel, never from source, so that a wheel that does not fit this machine is an error. ``base``: the
    Python of the environment."""
    run(base, "-m", "venv", "--clear", folder)
    python = folder / "bin" / "python"
    # torch brings the Triton that it needs, if any.
    constraints = ("-c", without(ROOT / "constraints.txt", ("triton",), folder)) if torch is None else ()
    requirement = "torch" if torch is None else f"torch=={torch}"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, *constraints, *torch_index(), requirement, "numpy", "safetensors")
    run(*pip, "--no-index", "--no-deps", wheel.resolve())
    elsewhere = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    run(python, "-m", "fasttfm", "info", **elsewhere)
    run(python, "-m", "fasttfm.selftest", "--device", "cpu", **elsewhere)
    run(*pip, *constraints, "transformers")
    print("the snippets of README.md", flush=True)
    run(python, "-c", readme_script((ROOT / "README.md").read_text()), folder, **elsewhere, HF_HUB_OFFLINE="1")


# The model that the snippets open is a small one with random weights, in a directory of that name.
_MODEL = """import os
import sys
import fasttfm.models
os.chdir(sys.argv[1])
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
fasttfm.models.BertForMaskedLM(fasttfm.models.BertConfig(**sizes)).save_pretrained("bert-base-uncased")
"""


def readme_script(text: str) -> str:
    """The Python snippets of a page as one program."""
    return "\n".join([_MODEL, *re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)])


def check_tag(tag: str) -> int:
    text = (ROOT / "python" / "fasttfm" / "_version.py").read_text()
    version = re.search(r'"([^"]+)"', text)
    expected = f"v{version[1]}" if version else "a version"
    if tag == expected:
        return 0
    print(f"release: expected the tag {expected} (python/fasttfm/_version.py), got {tag}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
