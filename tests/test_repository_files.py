"""Workflows, templates and the citation file follow their schemas, and workflows call the Makefile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fasttfm

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
FORMS = sorted(path for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.name != "config.yml")


def check_schema(schema: str, *files: Path) -> tuple[int, str]:
    """Exit status and output of check-jsonschema."""
    command = pytest.importorskip("check_jsonschema.cli.main_command", reason="check-jsonschema is not installed")
    from click.testing import CliRunner

    result = CliRunner().invoke(command.main, ["--builtin-schema", f"vendor.{schema}", *map(str, files)])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_follow_their_schemas(schema: str, files: list[Path]) -> None:
    assert files
    status, printed = check_schema(schema, *files)
    assert status == 0, printed


def test_a_wrong_workflow_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert check_schema("github-workflows", wrong)[0] == 1


def commands_of(workflow: str) -> list[str]:
    return re.findall(r"^\s*(?:- )?run: (.+)$", workflow, re.MULTILINE)


def targets_of(makefile: str) -> set[str]:
    return set(re.findall(r"^\.PHONY: ([\w-]+)$", makefile, re.MULTILINE))


def strange_commands(workflow: str, targets: set[str]) -> list[str]:
    """Steps that do not call a target of the Makefile."""
    commands = (command.split() for command in commands_of(workflow))
    return [" ".join(words) for words in commands if words[0] != "make" or words[1] not in targets]


def unpinned_actions(workflow: str) -> list[str]:
    """Actions of other repositories that are not pinned to a commit with a version in a comment."""
    used = re.findall(r"uses: (.+)", workflow)
    return [action for action in used if not re.search(r"^\./|@[0-9a-f]{40} # v\d+\.\d+\.\d+$", action)]


def test_an_action_has_one_version() -> None:
    """Two workflows that use an action use the same commit of it."""
    used = {line for path in WORKFLOWS for line in re.findall(r"uses: (\S+@.+)", path.read_text())}
    names = [line.partition("@")[0] for line in used]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_are_make_targets_and_actions_are_pinned(path: Path) -> None:
    text = path.read_text()
    assert strange_commands(text, targets_of((ROOT / "Makefile").read_text())) == []
    assert unpinned_actions(text) == []


def test_steps_outside_of_the_makefile_are_found() -> None:
    text = "- run: make lint\n- run: make nothing\n- run: pip install .\n- uses: actions/cache@v4.0.0\n"
    assert strange_commands(text, {"lint"}) == ["make nothing", "pip install ."]
    assert unpinned_actions(text) == ["actions/cache@v4.0.0"]


def test_ci_runs_the_tests_of_the_readme() -> None:
    """And every command of .ci/run and of the README is a target."""
    targets = targets_of((ROOT / "Makefile").read_text())
    run, readme = ((ROOT / name).read_text() for name in (".ci/run", "README.md"))
    called = re.findall(r"^make ([\w-]+)", run, re.MULTILINE)
    shown = re.findall(r"^make ([\w-]+)", readme, re.MULTILINE)
    assert {*called, *shown} <= targets
    assert called[0] == "test-all"
    assert {"demo", "test", "test-all"} <= {*shown}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_commands_of_the_makefile_keep_bytecode(tmp_path: Path) -> None:
    """Also where the environment forbids it: without bytecode each interpreter of a test compiles torch again."""
    rules = (ROOT / "Makefile").read_text() + '\nshow-bytecode:\n\t@echo "$${PYTHONDONTWRITEBYTECODE-unset}"\n'
    (tmp_path / "Makefile").write_text(rules)
    command = ["make", "--silent", "--directory", str(tmp_path), "show-bytecode"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == "unset"


def test_pre_commit_runs_the_tools_of_lint() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    hooks = re.findall(r"^ +entry: ([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert set(re.findall(r"\.venv/bin/([\w-]+)", recipe[1])) == set(hooks)


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {fasttfm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
