"""tools/new_op.py in a copy of the tree: the op that it writes passes its own tests and the house rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fasttfm import _C

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree that can be imported, with the installed core."""
    root = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "results", "*.egg-info", "*.so")
    for folder in ("kernels", "csrc", "python", "tests", "benchmarks", "docs", "tools"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignore, symlinks=True)
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "mkdocs.yml"):
        shutil.copy(ROOT / file, root)
    shutil.copy(_C.__file__, root / "python" / "fasttfm")
    link = root / "python" / "fasttfm" / "kernels"
    if not link.exists():  # a developer's tree may have it
        link.symlink_to(root / "kernels")
    return root


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "python")}
    return subprocess.run([sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def written(tree: Path) -> list[str]:
    """The paths that new_op.py prints."""
    result = run(tree, "tools/new_op.py", "scale_rows")
    assert result.returncode == 0, result.stderr
    return result.stdout.partition("\n\n")[0].splitlines()


@pytest.mark.slow
def test_the_new_op_passes_its_tests(tree: Path, written: list[str]) -> None:
    tests = ("tests/ops/test_scale_rows.py", "tests/test_house.py")
    result = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout


def test_the_new_op_is_imported_from_the_copy(tree: Path, written: list[str]) -> None:
    result = run(tree, "-c", "from fasttfm.ops import scale_rows; print(scale_rows.__code__.co_filename)")
    assert result.stdout.strip() == str(tree / "python/fasttfm/ops/scale_rows.py"), result.stderr


def test_it_lists_the_files_that_it_wrote(tree: Path, written: list[str]) -> None:
    paths = [tree / path for path in written]
    names = {path.name for path in paths}
    assert names >= {"reference.py", "scale_rows.py", "test_scale_rows.py", "scale_rows.md"}
    assert all(path.is_file() for path in paths)
    assert not any("skeleton" in path.read_text().lower() for path in paths)


def test_its_page_is_listed(tree: Path, written: list[str]) -> None:
    entries = re.findall(r"^::: (\S+)$", (tree / "docs/api/ops.md").read_text(), re.MULTILINE)
    after = entries[entries.index("fasttfm.ops.scale_rows.scale_rows") + 1]
    assert after == "fasttfm.ops.pack.token_indices_from_mask"
    pages = re.findall(r"- (.+): ops/(\w+)\.md$", (tree / "mkdocs.yml").read_text(), re.MULTILINE)
    assert pages[-1] == ("scale_rows", "scale_rows")
    assert {page for _, page in pages} == {path.stem for path in (tree / "docs/ops").glob("*.md")}


def test_the_new_files_are_formatted(tree: Path, written: list[str]) -> None:
    pytest.importorskip("ruff", reason="ruff is not installed: pip install -e '.[dev]'")
    files = [path for path in written if path.endswith(".py")]
    for command in (("check",), ("format", "--check")):
        result = run(tree, "-m", "ruff", *command, *files)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", ["Scale", "scale-rows", "2d_scale", "scale__rows", "_scale", "class", "", "../scale"])
def test_bad_names_are_refused(tree: Path, name: str) -> None:
    result = run(tree, "tools/new_op.py", name)
    assert result.returncode == 2
    assert f"new_op: name: expected lower-case words joined by underscores, got {name!r}" in result.stderr


@pytest.mark.parametrize("name", ["layer_norm", "core", "common"])
def test_taken_names_are_refused(tree: Path, name: str) -> None:
    before = (tree / "python/fasttfm/ops/__init__.py").read_text()
    result = run(tree, "tools/new_op.py", name)
    assert result.returncode == 2
    assert f"new_op: name: expected a new name, got {name!r}, which " in result.stderr
    assert (tree / "python/fasttfm/ops/__init__.py").read_text() == before
