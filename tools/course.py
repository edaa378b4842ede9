"""Writes the pages of docs/course as notebooks, and runs the code of a page.

  python tools/course.py notebooks                 write the notebook of every page next to it
  python tools/course.py run bert                  run a page's commands and Python in the current directory
  python tools/course.py run bert --pictures        and copy the pictures that the page shows to docs/course
  python tools/course.py run bert --quick          with at most two steps and epochs, as a smoke test

A page is Markdown. Its Python blocks become code cells; a block of commands becomes a cell whose lines begin with "!";
all other text stays Markdown. Notebooks are JSON in Jupyter's format 4.5, without outputs.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

COURSE = Path(__file__).resolve().parent.parent / "docs" / "course"
FOLDERS = (COURSE, COURSE / "ko")  # English and Korean
RUNS = "runs"  # where the pages' commands write
QUICK = 2  # steps and epochs of a quick run
_TEXT = "quick.txt"  # what it reads instead of the shipped corpus

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
_COUNT = re.compile(r"((?:--(?:[a-z]+-)?(?:steps|epochs) |\b(?:steps|epochs) ?= ?))(\d+)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+\.png)\)")


class Cell(NamedTuple):
    kind: str  # "markdown", "python" or "commands"
    text: str


def pages() -> list[Path]:
    """Every page of the course in both languages; an index has no code and no notebook."""
    return [page for folder in FOLDERS for page in sorted(folder.glob("*.md")) if page.stem != "index"]


def cells(text: str) -> list[Cell]:
    """The cells of a page."""
    page_cells: list[Cell] = []
    prose, end = "", 0
    for block in _BLOCK.finditer(text):
        prose += text[end : block.start()]
        end = block.end()
        language, code = block.groups()
        kind = "python" if language == "python" else "commands" if _is_commands(language, code) else None
        if kind is None:
            prose += block[0]
            continue
        page_cells += [Cell("markdown", prose.strip("\n")), Cell(kind, code.rstrip("\n"))]
        prose = ""
    page_cells.append(Cell("markdown", (prose + text[end:]).strip("\n")))
    return [cell for cell in page_cells if cell.text]


def _is_commands(language: str, code: str) -> bool:
    return not language and code.startswith("fasttfm ")


def commands(code: str) -> list[str]:
    """The commands of a block; a backslash continues a line."""
    return [line.strip() for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def notebook(page: Path) -> str:
    """The page as the text of a notebook."""
    made = []
    for number, cell in enumerate(cells(page.read_text(encoding="utf-8"))):
        shared: dict[str, Any] = {"id": f"{page.stem}-{number}", "metadata": {}}
        if cell.kind == "markdown":
            made.append({"cell_type": "markdown", **shared, "source": _lines(cell.text)})
            continue
        code = cell.text
        if cell.kind == "commands":
            # IPython replaces {name} by a variable, and {{ by {.
            code = "\n".join(f"!{' '.join(command.split())}" for command in commands(code))
            code = code.replace("{", "{{").replace("}", "}}")
        made.append({"cell_type": "code", **shared, "execution_count": None, "outputs": [], "source": _lines(code)})
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    book = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, ensure_ascii=False, indent=1) + "\n"


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def shortened(code: str) -> str:
    """The code with at most ``QUICK`` steps and epochs; commands that read the shipped corpus read ``_TEXT``."""
    code = _COUNT.sub(lambda match: f"{match[1]}{min(int(match[2]), QUICK)}", code)
    lines = code.split("\n")
    return "\n".join(f"{line} --data {_TEXT} --held-out 0.4" if _reads_corpus(line) else line for line in lines)


def _reads_corpus(line: str) -> bool:
    command = line.startswith(("!fasttfm pretrain ", "!fasttfm distill "))
    return command and not any(option in line for option in (" --task ", " --data ", " --language "))


def _write_short_text() -> None:
    from itertools import islice

    from fasttfm.data import read_documents, shipped_corpus

    texts = islice(read_documents(shipped_corpus() / "state-of-the-union.txt.gz"), 12)
    Path(_TEXT).write_text("\n\n".join(text[:2000].replace("\n\n", "\n") for text in texts), encoding="utf-8")


def run(page: Path, *, quick: bool = False) -> None:
    """Runs the code cells of a notebook in order, in this process and directory; Python cells share their names."""
    import matplotlib

    matplotlib.use("Agg")
    from fasttfm.cli.main import main as fasttfm

    if quick:
        _write_short_text()
    Path(RUNS).mkdir(exist_ok=True)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        code = "".join(cell["source"])
        code = shortened(code) if quick else code
        if not code.startswith("!"):
            exec(compile(code, str(page), "exec"), names)
            continue
        for line in code.splitlines():
            command = line[1:].replace("{{", "{").replace("}}", "}")
            print(f"\n$ {command}", flush=True)
            program, *arguments = shlex.split(command)
            if program != "fasttfm" or fasttfm(arguments):
                raise SystemExit(f"{page}: {command}: the command fails")


def _copy_picture(source: Path, target: Path) -> None:
    """A copy with a palette of 64 colours, which is a third of the size."""
    from PIL import Image

    with Image.open(source) as picture:
        picture.convert("RGB").quantize(64).save(target, optimize=True)


def pictures(page: Path) -> list[str]:
    """Names of the pictures that a page shows."""
    return _PICTURE.findall(page.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("notebooks", help="write the notebooks")
    running = actions.add_parser("run", help="run the code of a page")
    running.add_argument("page", choices=[page.stem for page in pages() if page.parent == COURSE])
    running.add_argument("--quick", action="store_true", help=f"at most {QUICK} steps and epochs")
    running.add_argument("--pictures", action="store_true", help="copy the page's pictures to docs/course")
    chosen = parser.parse_args(arguments)
    if chosen.action == "notebooks":
        for page in pages():
            page.with_suffix(".ipynb").write_text(notebook(page), encoding="utf-8")
        return 0
    page = COURSE / f"{chosen.page}.md"
    run(page, quick=chosen.quick)
    if chosen.pictures:
        for name in pictures(page):
            _copy_picture(Path(RUNS) / name, COURSE / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
