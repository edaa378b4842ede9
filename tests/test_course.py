"""The course: notebooks have the code of their pages, both languages have the same code, and the code runs."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fasttfm import models
from fasttfm.cli.main import COMMANDS, parser_of
from fasttfm.tasks.distillation_recipes import TinyBertRecipe
from fasttfm.tasks.distillation_runs import tinybert_student
from fasttfm.tasks.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "docs" / "course"
TOOL = ROOT / "tools" / "course.py"
LECTURES = sorted(page.stem for page in COURSE.glob("*.md") if page.stem != "index")
_MOST_BYTES = 60_000  # of a picture
# Pages whose smoke test takes seconds; those of the others, which fine-tune or distil, run with the slow tests.
_SHORT = ("gpt3",)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(TOOL.parent))
    try:
        import course
    finally:
        sys.path.remove(str(TOOL.parent))
    return course


# ---- pages and notebooks ---------------------------------------------------------------------------------------------


def test_each_notebook_is_that_of_its_page(tool: ModuleType) -> None:
    different = [page for page in tool.pages() if page.with_suffix(".ipynb").read_text() != tool.notebook(page)]
    assert not different, "run python tools/course.py notebooks"
    assert {path.with_suffix(".md") for folder in tool.FOLDERS for path in folder.glob("*.ipynb")} == set(tool.pages())


def test_a_page_becomes_cells(tool: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```\na formula\n```\n\n```\nfasttfm info \\\n  --json\nfasttfm doctor {x}\n```\n\n"
        "```python\nx = 1\nprint(x)\n```\n\nThe end.\n"
    )
    book = json.loads(tool.notebook(page))
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]] == [
        ("markdown", "# Title\n\n```\na formula\n```"),
        ("code", "!fasttfm info --json\n!fasttfm doctor {{x}}"),
        ("code", "x = 1\nprint(x)"),
        ("markdown", "The end."),
    ]
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])


@pytest.mark.parametrize("lecture", LECTURES)
def test_both_languages_have_the_same_code_and_pictures(tool: ModuleType, lecture: str) -> None:
    english, korean = COURSE / f"{lecture}.md", COURSE / "ko" / f"{lecture}.md"
    code, other = (
        [cell for cell in tool.cells(page.read_text()) if cell.kind != "markdown"] for page in (english, korean)
    )
    assert code == other
    assert len(code) > 0
    assert [f"../{name}" for name in tool.pictures(english)] == tool.pictures(korean)


@pytest.mark.parametrize("folder", [COURSE, COURSE / "ko"], ids=["en", "ko"])
def test_the_index_lists_every_lecture(folder: Path) -> None:
    assert sorted(re.findall(r"^\| \[.*?\]\((\w+)\.md\)", (folder / "index.md").read_text(), re.MULTILINE)) == LECTURES


def _inline_commands(text: str) -> list[str]:
    """Commands within sentences."""
    return [" ".join(command.split()) for command in re.findall(r"`fasttfm (\w[^`]*)`", text)]


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return parser_of({name: importlib.import_module(path) for name, path in COMMANDS.items()})[0]


@pytest.mark.parametrize("lecture", LECTURES)
def test_commands_within_sentences_are_whole_and_the_same_in_both_languages(
    tool: ModuleType, lecture: str, parser: ArgumentParser
) -> None:
    english, korean = (_inline_commands((folder / f"{lecture}.md").read_text()) for folder in tool.FOLDERS)
    for command in english:
        parser.parse_args(shlex.split(command))  # exits with the reason
    assert english == korean


@pytest.mark.parametrize("lecture", LECTURES)
def test_options_within_sentences_are_those_of_the_pages_commands(
    tool: ModuleType, lecture: str, parser: ArgumentParser
) -> None:
    """``--steps 4000`` is to be added to a command of the page, or to one that the sentence names."""
    for folder in tool.FOLDERS:
        text = (folder / f"{lecture}.md").read_text()
        commands = set(re.findall(r"fasttfm ([a-z-]+)", text)) | set(re.findall(r"commands/(\w+)\.md", text))
        known = {name for command in commands for name in _options(parser, command.replace("_", "-"))}
        named = set(re.findall(r"`(--[a-z-]+)", text))
        assert named - known == set(), f"{folder.name}/{lecture}.md, options of {', '.join(sorted(commands))}"


def _options(parser: ArgumentParser, command: str) -> list[str]:
    (commands,) = (each for each in parser._actions if isinstance(each, _SubParsersAction))
    found = commands.choices.get(command)  # pages like show_curves.md have no command of their own
    return [] if found is None else list(found._option_string_actions)


def test_the_pages_name_every_experiment_and_every_head_of_pretraining(tool: ModuleType) -> None:
    for folder in tool.FOLDERS:
        text = "".join((folder / f"{lecture}.md").read_text() for lecture in LECTURES)
        assert [name for name in EXPERIMENTS if not re.search(rf"[` ]{name}`", text)] == []
        for lecture in ("bert", "albert", "electra"):
            assert f"fasttfm predict --model runs/{lecture}" in text


def test_pictures_are_small_and_are_those_that_the_code_draws(tool: ModuleType) -> None:
    for lecture in LECTURES:
        page = COURSE / f"{lecture}.md"
        for name in tool.pictures(page):
            assert f"{tool.RUNS}/{name}" in page.read_text(), f"{page.name} shows {name}, which its code does not write"
            assert (COURSE / name).stat().st_size < _MOST_BYTES
    shown = {name for lecture in LECTURES for name in tool.pictures(COURSE / f"{lecture}.md")}
    assert shown == {path.name for folder in tool.FOLDERS for path in folder.glob("*.png")}


# ---- the code --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lecture", [pytest.param(name, marks=() if name in _SHORT else pytest.mark.slow) for name in LECTURES]
)
def test_a_notebook_runs_at_a_reduced_size(tool: ModuleType, lecture: str, tmp_path: Path) -> None:
    """Runs every command and every line of Python of a page; the whole run, of a minute, is left to its reader."""
    command = [sys.executable, str(TOOL), "run", lecture, "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    for name in tool.pictures(COURSE / f"{lecture}.md"):
        assert (tmp_path / tool.RUNS / name).read_bytes().startswith(b"\x89PNG")


def test_a_reduced_size_has_few_steps(tool: ModuleType) -> None:
    code = "!fasttfm pretrain bert --steps 400 --output a\nsteps = 2000\n"
    code += "!fasttfm distill --task classify --prediction-epochs 3"
    first, second, third = tool.shortened(code).split("\n")
    assert first.startswith("!fasttfm pretrain bert --steps 2 --output a --data ")
    assert (second, third) == ("steps = 2", "!fasttfm distill --task classify --prediction-epochs 2")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("```python\nprint(nothing)\n```\n", "name 'nothing' is not defined"),
        ("```\nfasttfm show curves --runs no --columns loss --output a.png\n```\n", "log.csv of a run, got no"),
    ],
)
def test_code_that_fails_is_found(
    tool: ModuleType,
    code: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.md"
    page.write_text(code)
    page.with_suffix(".ipynb").write_text(tool.notebook(page))
    monkeypatch.chdir(tmp_path)
    with pytest.raises((NameError, SystemExit)) as failure:
        tool.run(page)
    assert reason in f"{failure.value}{capsys.readouterr().err}"


# ---- where a lecture and a paper may differ --------------------------------------------------------------------------

# Spans are tested in tasks/test_answers.py, the residual projections of a GPT-2 in models/test_gpt.py.


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("distilled", "map the student's embeddings and states to the teacher's width; the teacher is not projected"),
        ("electra", "The training is not adversarial"),
        ("gpt", "0.02 / sqrt(N), where N is the number of all these layers"),
        ("bert", "the span from token i to j ≥ i"),
        ("bert", "a threshold that is tuned on the dev set"),
    ],
)
def test_the_page_of_the_family_says_so(family: str, sentence: str) -> None:
    assert sentence in " ".join((ROOT / "docs" / "families" / f"{family}.md").read_text().split())
    assert all(f"families/{family}.md" in (folder / "index.md").read_text() for folder in (COURSE, COURSE / "ko"))


def test_tinyberts_projection_maps_the_student_to_the_teachers_width() -> None:
    fields = {"vocab_size": 50, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16}
    teacher = models.BertForMaskedLM(models.BertConfig(hidden_size=32, num_hidden_layers=4, **fields))
    student = tinybert_student(teacher, layers=2, width=16)
    recipe = TinyBertRecipe(student, teacher)
    shapes = {name: (each.in_features, each.out_features) for name, each in recipe.projections.items()}
    assert shapes == {"embeddings": (16, 32), "hidden": (16, 32)}


def test_no_gradient_of_electras_discriminator_reaches_the_generators_layers() -> None:
    torch.manual_seed(0)
    config = models.ElectraConfig.named("tiny", vocab_size=50, max_position_embeddings=16)
    model = models.ElectraForJointPreTraining(config)
    ids = torch.randint(5, 50, (2, 8))
    labels: Tensor = torch.where(torch.arange(8) % 3 == 0, ids, -100)
    output = model(ids.masked_fill(labels >= 0, 4), labels=labels)
    output.discriminator_loss.backward(retain_graph=True)
    shared = {id(each) for each in model.discriminator.parameters()}
    own = {name: each for name, each in model.generator.named_parameters() if id(each) not in shared}
    assert [name for name, each in own.items() if each.grad is not None and each.grad.any()] == []
    output.generator_loss.backward()
    assert all(each.grad is not None for each in own.values())
    assert any("layers" in name and each.grad.any() for name, each in own.items())


def test_questions_without_an_answer_have_no_classifier() -> None:
    fields = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = models.BertForQuestionAnswering(models.BertConfig(**fields, intermediate_size=32))
    head = [tuple(each.shape) for name, each in model.named_parameters() if not name.startswith("bert.")]
    assert head == [(2, 16), (2,)], "expected a start and an end vector, and nothing else"
