"""The code of every page runs as it is printed, and the links of the documentation are valid."""

from __future__ import annotations

import csv
import importlib
import re
import runpy
import shlex
import time
from argparse import ArgumentParser
from pathlib import Path

import pytest

from fasttfm.cli.main import COMMANDS, main, parser_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _broken_links(page: Path) -> list[str]:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    return [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_files(page: Path) -> None:
    assert _broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md), [there](other.md#part), [elsewhere](https://example.org)")
    assert _broken_links(page) == ["other.md"]


# ---- code ------------------------------------------------------------------------------------------------------------

# Pages whose blocks continue each other. Those of docs/start also run their commands, in the order of the page.
STARTS = [page for page in sorted(ROOT.glob("docs/start/*.md")) if page.stem != "write_kernels"]
TUTORIALS = [ROOT / "README.md", *sorted(ROOT.glob("docs/tutorials/*.md"))]
OP_PAGES = sorted(ROOT.glob("docs/ops/*.md"))
# Pages whose code their own tests run: test_layer_norm_steps.py, test_course.py.
PRINTED = [ROOT / "docs/start/write_kernels.md", *sorted(ROOT.glob("docs/course/**/*.md"))]
BLOCKS = [
    pytest.param(page, number, id=f"{page.relative_to(ROOT / 'docs')}-{number}", marks=pytest.mark.slow)
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if page not in (*TUTORIALS, *STARTS, *PRINTED)
    for number in range(page in OP_PAGES, len(_BLOCK.findall(page.read_text())))  # an op's first block: a test below
]
# Packages that a block may import and that no extra of the tests installs.
_FURTHER = ("onnxruntime", "onnxscript", "sentence_transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small checkpoints and texts under the names that the pages use."""
    transformers = pytest.importorskip("transformers")
    from small_models import addresses, save_bert

    from fasttfm.data import train_tokenizer

    folder = tmp_path_factory.mktemp("pages")
    (folder / "books").mkdir()
    (folder / "books" / "addresses.txt").write_text("\n\n".join(addresses(4)))
    (folder / "texts.txt").write_text("The people are at peace.\nThe army marched at dawn.\nPeace.\n")
    lines = ["text,label", *(f'"The {noun} of the nation.",{noun}' for noun in 10 * ("peace", "war"))]
    (folder / "reviews.csv").write_text("\n".join(lines) + "\n")
    tokenizer = train_tokenizer("wordpiece", addresses(20), 1000)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for name in ("run/latest", "bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2"):
        save_bert(tokenizer, folder / name, **sizes)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder / "gpt2")
    return folder


def run_blocks(page: Path, blocks: list[str]) -> None:
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_run_as_printed(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = _BLOCK.findall(page.read_text())
    assert blocks, "a page without code"
    monkeypatch.chdir(folder)
    run_blocks(page, blocks)


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize(("page", "number"), BLOCKS)
def test_every_block_runs_by_itself(page: Path, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = _BLOCK.findall(page.read_text())[number]
    for package in _FURTHER:
        if package in block:
            pytest.importorskip(package, reason="the block imports it")
    monkeypatch.chdir(folder)
    run_blocks(page, [block])


def test_an_incomplete_block_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(model)\n```\n")
    with pytest.raises(NameError, match="model"):
        run_blocks(page, _BLOCK.findall(page.read_text()))


_OP_EXAMPLE_SECONDS = 5.0  # of processor time; on an idle core they take less than one


@pytest.mark.parametrize("page", OP_PAGES, ids=lambda page: page.stem)
def test_an_op_page_opens_with_a_sentence_and_a_quick_example(page: Path) -> None:
    title, sentence, block = re.split(r"\n\n(?=\S)", page.read_text(), maxsplit=3)[:3]
    assert re.fullmatch(r"# [\w, ]+", title)
    assert sentence.endswith(".")
    assert block.startswith("```python\n")
    (example, *_) = _BLOCK.findall(page.read_text())
    assert len(example.splitlines()) <= 10, "expected an example of about six lines"
    start = time.process_time()
    run_blocks(page, [example])
    assert time.process_time() - start < _OP_EXAMPLE_SECONDS


def test_every_op_has_its_chart_on_its_page() -> None:
    charts = {
        path.stem.removeprefix("nvidia-h200-"): path for path in ROOT.glob("benchmarks/results/nvidia-h200-*.png")
    }
    for page in OP_PAGES:
        if page.stem in charts:
            assert charts[page.stem].name in page.read_text(), f"{page.name} does not show {charts[page.stem].name}"


_WORDS = 1_500  # about three screens


def test_a_page_fits_three_screens() -> None:
    pages = [path for path in ROOT.glob("docs/**/*.md") if "notes" not in path.parts]
    long = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in pages}
    assert {page: words for page, words in long.items() if words > _WORDS} == {}


def _commands(text: str) -> list[str]:
    """The commands in a page's code blocks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.replace("\\\n", " ").splitlines()]
    found = [re.search(r"(?:^|\| |-m )fasttfm ([a-z].*)$", line) for line in lines]
    return [match[1].partition(" < ")[0] for match in found if match and "..." not in match[1]]


def _steps(text: str) -> list[tuple[str, str]]:
    """The Python blocks ("python") and commands ("") of a page, in its order."""
    blocks = re.findall(r"^```(python|)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        (language, step)
        for language, block in blocks
        for step in ([block] if language else _commands(f"```\n{block}```\n"))
    ]


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize(
    "page",
    [
        # Trains a tokenizer on the shipped corpus, and a model twice.
        pytest.param(page, marks=pytest.mark.slow if page.stem == "pretrain" else (), id=page.stem)
        for page in STARTS
    ],
)
def test_quick_starts_run_as_printed(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python blocks continue each other; commands that need a corpus or several GPUs only have valid arguments."""
    monkeypatch.chdir(folder)
    namespace: dict[str, object] = {"__name__": page.stem}
    for language, step in _steps(page.read_text()):
        if language:
            exec(compile(step, str(page), "exec"), namespace)
        elif "corpus/" not in step:
            assert not main(shlex.split(step, comments=True)), step


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return parser_of({name: importlib.import_module(module) for name, module in COMMANDS.items()})[0]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if _commands(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_printed_commands_have_arguments_that_exist(page: Path, parser: ArgumentParser) -> None:
    for command in _commands(page.read_text()):
        parser.parse_args(shlex.split(command, comments=True))  # exits with the reason


def test_a_command_with_an_argument_that_does_not_exist_is_found(parser: ArgumentParser) -> None:
    text = "```\nfasttfm finetune classify --model DIR --task qa\nmake demo\n```\n"
    assert _commands(text) == ["finetune classify --model DIR --task qa"]
    with pytest.raises(SystemExit):
        parser.parse_args(shlex.split(_commands(text)[0]))


@pytest.mark.parametrize("module", ["ops", "nn", "models"])
def test_every_public_name_is_on_the_page_of_the_api(module: str) -> None:
    page = (ROOT / "docs" / "api" / f"{module}.md").read_text()
    shown = {name.rpartition(".")[2] for name in re.findall(r"^(?::::|##) (\S+)$", page, re.MULTILINE)}
    public = importlib.import_module(f"fasttfm.{module}").__all__
    assert set(public) - shown == set()


# ---- the site --------------------------------------------------------------------------------------------------------


def _navigation() -> set[str]:
    """Paths of pages in mkdocs.yml's navigation."""
    return set(re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def test_the_navigation_has_every_page_but_the_notes() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert _navigation() - {"index.md", "contributing.md", "changelog.md"} == {
        page for page in pages if not page.startswith("notes/")
    }
    assert re.search(r"^exclude_docs: \|\n  notes/$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


QUESTIONS = {  # what a reader looks for, and text on the page that answers it
    "patch a model": "fasttfm.patch(model)",
    "embed a file": "fasttfm embed --model",
    "fine-tune on a CSV file": "--data reviews.csv",
    "see why an op is slow": "fasttfm.explain(",
    "add an op": "tools/new_op.py",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_readme_answers_a_question_in_two_clicks(question: str) -> None:
    def pages_of(page: Path) -> set[Path]:
        links = [link for link in _LINK.findall(page.read_text()) if link.endswith(".md") and "://" not in link]
        return {(page.parent / link).resolve() for link in links}

    first = pages_of(ROOT / "README.md")
    second = {page for link in first for page in pages_of(link)}
    assert any(QUESTIONS[question] in page.read_text() for page in first | second)


# ---- the README's figures --------------------------------------------------------------------------------------------

RESULTS = ROOT / "benchmarks" / "results"


def _speed_rows(text: str) -> list[tuple[str, str, float]]:
    """Both printed times and the printed ratio of each row of a table of speeds."""
    found = re.findall(r"^\|[^|]*\| ([\d.]+) ms \| ([\d.]+) ms[^|]*\| ([\d.]+)x \|$", text, re.MULTILINE)
    return [(ours, peer, float(ratio)) for ours, peer, ratio in found]


def _wrong_speeds(text: str) -> list[str]:
    """Times that are not the median of a result, and ratios that are not those of the printed times."""
    rows = [row for path in RESULTS.glob("*-*_*.csv") for row in csv.DictReader(path.read_text().splitlines())]
    rows += [row for path in RESULTS.glob("*-inference.csv") for row in csv.DictReader(path.read_text().splitlines())]
    rows += [row for path in RESULTS.glob("*-encoders.csv") for row in csv.DictReader(path.read_text().splitlines())]
    medians = [float(row["ms_p50"]) for row in rows if row.get("ms_p50")]
    wrong = []
    for ours, peer, ratio in _speed_rows(text):
        for printed in (ours, peer):
            decimals = len(printed.partition(".")[2])
            if not any(f"{median:.{decimals}f}" == printed for median in medians):
                wrong.append(f"{printed} ms is no row of benchmarks/results")
        if abs(float(peer) / float(ours) / ratio - 1) > 0.02:  # both are rounded
            wrong.append(f"{peer} / {ours} is not {ratio}")
    return wrong


def test_the_speeds_of_the_readme_are_rows() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(_speed_rows(text)) == text.count("x |\n") > 10
    assert _wrong_speeds(text) == []


def test_a_speed_without_a_row_is_found() -> None:
    table = "| a | 124.7 ms | 182.6 ms | 1.46x |\n| b | 124.7 ms | 999.9 ms, torch | 8.02x |\n"
    table += "| c | 124.7 ms | 182.6 ms | 2x |\n"
    assert _wrong_speeds(table) == ["999.9 ms is no row of benchmarks/results", "182.6 / 124.7 is not 2.0"]


def test_the_chart_of_the_readme_shows_the_rows() -> None:
    image = pytest.importorskip("PIL.Image")
    chart = runpy.run_path(str(ROOT / "benchmarks" / "overview_chart.py"))
    stem = RESULTS / "nvidia-h200"
    expected = chart["description"](chart["panel_rows"](stem))
    with image.open(f"{stem}-overview.png") as png:
        assert png.text["Description"] == expected, "run benchmarks/overview_chart.py benchmarks/results/nvidia-h200"


def test_the_charts_of_kernels_have_rows() -> None:
    charts = runpy.run_path(str(ROOT / "benchmarks" / "kernel_charts.py"))
    limits = charts["largest_cases"](charts["read"](RESULTS / "nvidia-h200.csv"))
    assert {"layer_norm", "attention", "mlp"} <= limits.keys()
    assert all(0 < ours < 1.1 and 0 < peer < 1.1 for _, ours, peer in limits.values())
    lines = charts["few_tokens"](charts["read"](RESULTS / "nvidia-h200-kernel_variants.csv"))
    assert len(lines) == 4
    assert all(len(points) > 5 for points in lines.values())
