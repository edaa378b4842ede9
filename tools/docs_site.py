"""A hook of mkdocs.yml: adds the pages of the repository's root and the charts of benchmarks/results, and maps links.

Links in the pages are paths in the repository. They become links of the site; a link to a file that the site does not
have is replaced by its text. A link to a file that does not exist stays as it is, and MkDocs fails on it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
RESULTS = "benchmarks/results"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for chart in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"{RESULTS}/{chart.name}", abs_src_path=str(chart)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with the links of the site. Notes, which record measurements, are not found by the site's search."""
    shown = page.file.src_uri
    if shown.startswith("notes/"):
        page.meta["search"] = {"exclude": True}
    source = next((name for name, uri in ROOT_PAGES.items() if uri == shown), f"docs/{shown}")
    known = {file.src_uri for file in files}

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        uri = ROOT_PAGES.get(path, path.removeprefix("docs/"))
        if uri in known:
            return f"{image}[{text}]({os.path.relpath(uri, os.path.dirname(shown) or '.')}{anchor})"
        return text if not image and (ROOT / path).exists() else match[0]

    return _LINK.sub(link, markdown)
