"""The code of every page runs as it is printed, and the documentation's links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _broken_links(page: Path) -> list[str]:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    return [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    assert _broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md), [there](other.md#part), [elsewhere](https://example.org)")
    assert _broken_links(page) == ["other.md"]


# ---- code ------------------------------------------------------------------------------------------------------------

TUTORIALS = [ROOT / "README.md", *sorted(ROOT.glob("docs/tutorials/*.md"))]  # their blocks continue each other
BLOCKS = [
    pytest.param(page, number, id=f"{page.relative_to(ROOT / 'docs')}-{number}")
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if page not in TUTORIALS
    for number in range(len(_BLOCK.findall(page.read_text())))
]
# Packages that a block may import and that no extra of the tests installs.
_FURTHER = ("onnxruntime", "onnxscript", "sentence_transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small checkpoints and texts by the names that the pages give them."""
    transformers = pytest.importorskip("transformers")
    from small_models import addresses, save_bert

    from fasttfm.data import train_tokenizer

    folder = tmp_path_factory.mktemp("pages")
    (folder / "books").mkdir()
    (folder / "books" / "addresses.txt").write_text("\n\n".join(addresses(4)))
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


def test_a_block_that_is_not_complete_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(model)\n```\n")
    with pytest.raises(NameError, match="model"):
        run_blocks(page, _BLOCK.findall(page.read_text()))


def test_every_op_has_its_chart_on_its_page() -> None:
    charts = {
        path.stem.removeprefix("nvidia-h200-"): path for path in ROOT.glob("benchmarks/results/nvidia-h200-*.png")
    }
    for page in ROOT.glob("docs/ops/*.md"):
        if page.stem in charts:
            assert charts[page.stem].name in page.read_text(), f"{page.name} does not show {charts[page.stem].name}"
