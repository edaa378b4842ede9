"""The page in headless Chromium, at the widths of a desktop and of a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
WIDTHS = {"desktop": (1280, 900), "phone": (375, 740)}


def test_the_page_loads_nothing_from_elsewhere(served: Any) -> None:
    for path in ("/", "/docs", "/page/app.js", "/page/style.css"):
        response = served.client.get(path)
        assert response.status_code == 200
        assert "//" not in response.text.replace("// ", "").replace("http://www.w3.org", "")
    described = served.client.get("/openapi.json").json()
    assert {"/embed", "/v1/embeddings", "/v2/rerank", "/fill-mask"} <= described["paths"].keys()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed")
    folder = tmp_path_factory.mktemp("profile")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder, executable_path=program, args=FLAGS, headless=True, env=environment
        )
        yield context
        context.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_the_playground(served: Any, browser: Any, width: str, tmp_path: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.set_viewport_size(dict(zip(("width", "height"), WIDTHS[width], strict=True)))
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(served.url)
    page.wait_for_selector("#tabs button")
    assert page.text_content("#health") == "healthy"
    assert page.locator("#models tbody tr").count() == 7
    expected = {  # the tool -> what its answer has
        "similarity": ".big",
        "search": ".rank",
        "rerank": ".rank",
        "labels": ".rank",
        "entities": "p",
        "question": ".big",
        "mask": ".rank",
        "prompt": "pre",
    }
    for tool, answer in expected.items():
        page.click(f"#tabs button[data-tool={tool}]")
        page.click("#form button.send")
        page.wait_for_selector(f"#answer {answer}")
        page.wait_for_selector("#form button.send:not([disabled])")
        assert page.locator("#answer .error").count() == 0, page.text_content("#answer")
    assert len(page.text_content("#answer pre")) > len("The state of the union is")
    page.screenshot(path=str(Path(os.environ.get("FASTTFM_SCREENSHOTS", tmp_path)) / f"{width}.png"), full_page=True)
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    page.click("#tabs button[data-tool=mask]")
    page.fill("#form textarea", "no mask")
    page.click("#form button.send")
    page.wait_for_selector("#answer .error")
    assert "[MASK]" in (page.text_content("#answer .error") or "")
    assert errors == []
    page.close()
