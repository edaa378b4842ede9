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


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/tutorials/*.md")), ids=lambda page: page.stem)
def test_a_tutorial_runs_as_printed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = _BLOCK.findall(page.read_text())
    assert blocks, "a tutorial without code"
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
