"""The tutorials run as they are printed, and the documentation's links lead somewhere."""

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


@pytest.fixture(scope="module")
def bert_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of transformers by the name that the README gives it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **sizes)).save_pretrained(
        folder / "bert-base-uncased"
    )
    return folder


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/tutorials/*.md"))], ids=lambda p: p.stem)
def test_code_runs_as_printed(page: Path, bert_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = _BLOCK.findall(page.read_text())
    assert blocks, "a page without code"
    monkeypatch.chdir(bert_directory)
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


def test_every_op_has_its_chart_on_its_page() -> None:
    charts = {
        path.stem.removeprefix("nvidia-h200-"): path for path in ROOT.glob("benchmarks/results/nvidia-h200-*.png")
    }
    for page in ROOT.glob("docs/ops/*.md"):
        if page.stem in charts:
            assert charts[page.stem].name in page.read_text(), f"{page.name} does not show {charts[page.stem].name}"
