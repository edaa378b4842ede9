"""tools/wheel.py: the tag of a release and the description of a wheel. `make wheel` runs the rest."""

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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # as for a script: it imports tools/environment.py
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


def test_the_snippets_of_the_readme_are_one_program(wheel: ModuleType) -> None:
    script = wheel.readme_script("text\n```python\na = 1\n```\n```\nmake demo\n```\n```python\nprint(a)\n```\n")
    assert "import fasttfm.models" in script
    assert script.endswith("a = 1\n\nprint(a)\n")
    compile(wheel.readme_script((Path(__file__).parents[2] / "README.md").read_text()), "README.md", "exec")


def test_a_release_has_a_wheel_for_each_python_over_one_core(
    wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTTFM_BUILD_DIR", raising=False)
    monkeypatch.setattr(wheel, "OBJECTS", tmp_path)
    calls: list[tuple[list[str], dict[str, str]]] = []

    def run(*command: str | Path, **variables: str) -> None:
        words = [str(part) for part in command]
        calls.append((words, variables))
        name = f"fasttfm-0-cp{len(calls)}.whl"
        if words[2:4] == ["pip", "wheel"]:
            (tmp_path / "wheels").mkdir(exist_ok=True)
            zipfile.ZipFile(tmp_path / "wheels" / name, "w").close()
        elif "auditwheel" in words:
            (tmp_path / "dist").mkdir(exist_ok=True)
            zipfile.ZipFile(tmp_path / "dist" / name, "w").close()

    monkeypatch.setattr(wheel, "run", run)
    monkeypatch.setattr(wheel, "torch_index", lambda: ["--extra-index-url", "builds"])
    pythons = ["python3.10", "python3.14"]
    options = [text for python in pythons for text in ("--python", python)]
    assert wheel.main(["release", *options, "--torch", "2.9.0", "--output", str(tmp_path / "dist")]) == 0
    builds = [(words, variables) for words, variables in calls if words[2:4] == ["pip", "wheel"]]
    assert [words[0] for words, _ in builds] == pythons
    assert {variables["FASTTFM_BUILD_DIR"] for _, variables in builds} == {str(tmp_path / "core")}
    assert not [words for words, _ in builds if "--no-build-isolation" in words]
    assert all({"PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"} <= variables.keys() for _, variables in builds)
    assert [words[0] for words, _ in calls if words[1:3] == ["-m", "venv"]] == pythons
    installed = [Path(words[-1]).name for words, _ in calls if "--no-index" in words]
    assert len(installed) == len(set(installed)) == 2
    assert len([words for words, _ in calls if "fasttfm.selftest" in words]) == 2
    assert len([words for words, _ in calls if "fasttfm.patch(model)" in words[2]]) == 2
    torch = [words for words, _ in calls if "torch==2.9.0" in words]
    assert len(torch) == 2
    assert all("builds" in words for words in torch)


def test_without_isolation_there_are_no_constraints_of_the_build(
    wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip exits with an error if it gets both."""
    calls: list[tuple[tuple[str | Path, ...], dict[str, str]]] = []

    def run(*command: str | Path, **variables: str) -> None:
        calls.append((command, variables))
        (tmp_path / "wheels").mkdir()
        zipfile.ZipFile(tmp_path / "wheels" / "fasttfm-0-py3-none-any.whl", "w").close()

    monkeypatch.setattr(wheel, "OBJECTS", tmp_path)
    monkeypatch.setattr(wheel, "run", run)
    monkeypatch.setattr(wheel, "repair", lambda raw, output: raw)
    wheel.build(tmp_path / "dist")
    ((command, variables),) = calls
    assert "--no-build-isolation" in command
    assert variables.keys() == {"FASTTFM_BUILD_DIR"}
