"""From tree to sdist to wheel to import, with the tools of this interpreter and no network; and build options."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREE = ("kernels", "csrc", "python", "tests", "benchmarks", "docs", "tools")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("FASTTFM_")},
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
}
pytest.importorskip("pybind11", reason="pybind11 is not installed, and the core cannot be built without")
for tool in ("cmake", "ninja"):
    if shutil.which(tool, path=ENVIRONMENT["PATH"]) is None:
        pytest.skip(f"{tool} is not installed, and the core cannot be built without", allow_module_level=True)


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def only(paths: list[Path]) -> Path:
    (path,) = paths
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools writes into the source tree."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in TREE:
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run(sys.executable, "-c", code, cwd=tree)
    return only(list((tree / "dist").glob("*.tar.gz")))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(sdist, folder)
    source = only([path for path in folder.iterdir() if path.is_dir()])
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder, FASTTFM_CUDA="OFF")
    return only(list(folder.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()


def test_the_sdist_contains_everything_needed_to_build_and_test(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "setup.py", "constraints.txt", "Makefile", "docs/ops/layer_norm.md"} <= names
    assert {"python/fasttfm/data/corpus/moby-dick.txt.gz", "python/fasttfm/data/corpus/tasks/qa-dev.json"} <= names
    assert {
        "kernels/layer_norm/cpu.cpp",
        "kernels/attention/hopper/forward/forward.cu",
        "csrc/binding.h",
        "python/fasttfm/_C.pyi",
        "tools/new_op.py",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.slow
def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        "py.typed",
        "_C.pyi",
        "kernels/__init__.py",
        "kernels/common/rows.py",
        "kernels/common/triton/philox.py",
        "testing/harness.py",
    }
    expected |= {f"kernels/layer_norm/{name}.py" for name in ("reference", "triton")}
    assert {f"fasttfm/{name}" for name in expected} <= names
    assert len([name for name in names if re.fullmatch(r"fasttfm/_C\.[\w.-]+\.so", name)]) == 1
    assert {name.split("/")[0] for name in names} == {"fasttfm"}
    shipped = {name.removeprefix("fasttfm/data/corpus/") for name in names if name.startswith("fasttfm/data/corpus/")}
    tasks = {"classify": "tsv", "pair": "tsv", "tag": "conll", "qa": "json", "choice": "csv"}
    tasks |= {"relation": "jsonlines", "entity-typing": "jsonlines", "commonsense": "jsonlines", "similarity": "tsv"}
    tasks["image"] = "npz"
    sets = {f"tasks/{task}-{part}.{suffix}" for task, suffix in tasks.items() for part in ("train", "dev")}
    graph = {"knowledge/triples.tsv", "knowledge/mentions.jsonlines.gz", "tasks/commonsense-graph.tsv"}
    assert shipped == {"README.md", "state-of-the-union.txt.gz", "moby-dick.txt.gz", *sets, *graph}
    page = {name for name in names if name.startswith("fasttfm/serve/page/")}
    assert {Path(name).name for name in page} == {"index.html", "app.js", "style.css"}
    folders = ("fasttfm/data/corpus/", "fasttfm/data/languages/", "fasttfm/serve/page/")
    others = {name for name in names if not name.startswith(folders)}
    assert {Path(name).suffix for name in others} == {".py", ".pyi", ".so", ".typed"}


@pytest.mark.slow
def test_the_wheel_of_the_sdist_has_the_trees_modules(wheel: Path) -> None:
    folders = {"python/fasttfm": "fasttfm", "kernels": "fasttfm/kernels"}
    tree = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, package in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    assert found == {name: path.read_bytes() for name, path in tree.items()}


@pytest.mark.slow
def test_the_package_has_three_dependencies(metadata: str) -> None:
    required = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    assert sorted(line for line in required if "extra ==" not in line) == ["numpy", "safetensors", "torch>=2.9"]
    # The torch that is installed brings its own Triton.
    assert not [line for line in required if "extra ==" in line and re.match(r"(torch|triton)\b", line)]
    assert set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)) >= {"train", "test", "bench", "hf", "dev"}
    assert re.search(r"^Requires-Python: >=3\.10$", metadata, re.MULTILINE)


@pytest.mark.slow
def test_the_wheel_imports_and_computes_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    code = """
        import fasttfm, torch
        from fasttfm import _C
        assert _C.cuda_version == 0 and _C.version == fasttfm.__version__
        y = fasttfm.nn.LayerNorm(8)(torch.randn(3, 8))
        from fasttfm import data
        assert len(list(data.read_documents(data.shipped_corpus()))) == 161 and data.shipped_task("qa")["dev"].is_file()
        print(fasttfm.explain("layer_norm", y).chosen, fasttfm.__file__)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    printed = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert printed.split() == ["cpu", str(site / "fasttfm" / "__init__.py")]
    info = run(sys.executable, "-m", "fasttfm", "info", cwd=tmp_path, PYTHONPATH=str(site))
    assert "without CUDA" in info


# ---- options of the build --------------------------------------------------------------------------------------------


def configure(folder: Path, *definitions: str) -> tuple[int, str]:
    """CMake's exit status and its output without line breaks."""
    import pybind11

    fixed = (f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *fixed, *definitions]
    result = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return result.returncode, " ".join(result.stdout.split())


def test_cuda_on_without_nvcc_says_what_to_install(tmp_path: Path) -> None:
    status, printed = configure(tmp_path, "-DFASTTFM_CUDA=ON", "-DFASTTFM_NVCC=")
    assert status != 0
    assert "FASTTFM_CUDA=ON, but no nvcc was found" in printed
    assert "Install the CUDA toolkit" in printed


def test_cuda_auto_without_nvcc_builds_the_cpu_core(tmp_path: Path) -> None:
    status, printed = configure(tmp_path, "-DFASTTFM_CUDA=AUTO", "-DFASTTFM_NVCC=")
    assert status == 0, printed
    assert "CUDA (OFF)" in printed


has_driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


@pytest.mark.skipif(has_driver, reason="there is an NVIDIA driver")
def test_cuda_auto_without_a_driver_builds_the_cpu_core(tmp_path: Path) -> None:
    status, printed = configure(tmp_path, "-DFASTTFM_CUDA=AUTO")
    assert status == 0, printed
    assert "CUDA (OFF)" in printed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("gpus", "archs"),
    [(["9.0", "9.0"], "90a 90-virtual"), (["8.6", "9.0"], "86 90a 86-virtual"), (["7.5"], "80 90a 80-virtual")],
)
def test_cuda_auto_builds_for_the_gpus_of_this_machine(gpus: list[str], archs: str, tmp_path: Path) -> None:
    """A GPU that the kernels do not support leaves the default."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\n" + "".join(f"echo {gpu}\n" for gpu in gpus))
    command.chmod(0o755)
    status, printed = configure(tmp_path / "build", "-DFASTTFM_CUDA=AUTO", f"-DFASTTFM_NVIDIA_SMI={command}")
    assert status == 0, printed
    assert f"CUDA (ON) configured; architectures: {archs}" in printed


def test_an_unknown_value_is_refused(tmp_path: Path) -> None:
    status, printed = configure(tmp_path, "-DFASTTFM_CUDA=MAYBE")
    assert status != 0
    assert "FASTTFM_CUDA: expected AUTO, ON or OFF, got 'MAYBE'" in printed


# ---- the pinned environment ------------------------------------------------------------------------------------------


def test_build_tools_are_the_same_everywhere() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = {re.split(r"[<>=]", text)[0] for text in project["build-system"]["requires"]}
    environment = (ROOT / "tools" / "environment.py").read_text()
    installed = set(re.findall(r'"(\w+)"', re.search(r"^BUILD_TOOLS = \((.*)\)", environment, re.MULTILINE)[1]))
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert required == installed == {"setuptools", "cmake", "ninja", "pybind11"}
    docs = set(re.findall(r'"([^"]+)"', re.search(r"^DOCS_TOOLS = \((.*)\)", environment, re.MULTILINE)[1]))
    assert docs == set(project["project"]["optional-dependencies"]["docs"])
    assert required | {"torch", "triton", "numpy", "safetensors"} <= pinned
