"""tools/wheel.py: the tag of a release and what is said about a wheel. `make wheel` runs the rest."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import fasttfm


@pytest.fixture(scope="module")
def wheel() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "wheel.py"
    spec = importlib.util.spec_from_file_location("wheel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tag_is_the_version(wheel: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert wheel.main(["version", f"v{fasttfm.__version__}"]) == 0
    assert wheel.main(["version", "v9.9.9"]) == 1
    expected = f"release: expected the tag v{fasttfm.__version__} (python/fasttfm/_version.py), got v9.9.9\n"
    assert capsys.readouterr().err == expected


def test_a_wheel_is_described_by_its_largest_files(wheel: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("small.py", "x")
        archive.writestr("_C.so", bytes(2_000_000))
    first, second = wheel.describe(path).splitlines()[:2]
    assert first == f"{path}: 2.0 MB"
    assert second == "  _C.so: 2.0 MB, unpacked 2.0 MB"
