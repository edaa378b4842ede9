"""Makes the texts and labelled sets that ship with fasttfm: ``python tools/make_corpus.py FOLDER``.

FOLDER contains ``sotu.jsonl.gz`` (one address per line: ``id``, such as 1790_george_washington_n, and ``text``) and
``moby-dick.txt.gz``; python/fasttfm/data/corpus/README.md names their sources. The output is
deterministic.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

import corpus_tasks

from fasttfm.data.sentences import sentence_starts

OUTPUT = Path(__file__).resolve().parent.parent / "python" / "fasttfm" / "data" / "corpus"
# Two of three addresses of at most this many characters, and the beginning and the end of the book.
LONGEST = 45_000
CHAPTERS = {*range(1, 61), 133, 134, 135}


class Source(NamedTuple):
    """Documents as sentences, with their names: an address's year and president, a chapter's number."""

    addresses: dict[str, list[str]]
    chapters: dict[str, list[str]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes the texts and labelled sets that ship with fasttfm.")
    parser.add_argument("folder", type=Path, help="with sotu.jsonl.gz and moby-dick.txt.gz")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT.name} in the package")
    parsed = parser.parse_args(arguments)
    source = Source(addresses(parsed.folder / "sotu.jsonl.gz"), chapters(parsed.folder / "moby-dick.txt.gz"))

    short = [name for name, lines in source.addresses.items() if sum(map(len, lines)) <= LONGEST]
    chosen = {name: source.addresses[name] for number, name in enumerate(short) if number % 3 != 2}
    write(parsed.output / "state-of-the-union.txt.gz", chosen)
    book = {name: lines for name, lines in source.chapters.items() if int(name) in CHAPTERS}
    write(parsed.output / "moby-dick.txt.gz", book)

    (parsed.output / "tasks").mkdir(exist_ok=True)
    for name, text in corpus_tasks.make(source.addresses, source.chapters).items():
        path = parsed.output / "tasks" / name
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text.encode()):,} bytes")
    return 0


def addresses(path: Path) -> dict[str, list[str]]:
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    return {row["id"]: sentences(row["text"]) for row in rows}


def chapters(path: Path) -> dict[str, list[str]]:
    """The book's chapters; its lines are broken in the middle of sentences, its paragraphs by blank lines."""
    text = gzip.decompress(path.read_bytes()).decode()
    chapters: dict[str, list[str]] = {}
    for part in re.split(r"(?m)^CHAPTER (?=\d)", text)[1:]:
        number, _, rest = part.partition(".")
        paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", rest)]
        chapters[number] = [line for paragraph in paragraphs for line in sentences(paragraph)]
    return chapters


def sentences(text: str) -> list[str]:
    bounds = [0, *sentence_starts(text), len(text)]
    lines = [" ".join(text[low:high].split()) for low, high in itertools.pairwise(bounds)]
    return [line for line in lines if line]


def write(path: Path, documents: dict[str, list[str]]) -> None:
    """One sentence per line, and a blank line between documents."""
    text = "\n\n".join("\n".join(lines) for lines in documents.values()) + "\n"
    data = gzip.compress(text.encode(), 9, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"{path.name}: {len(documents)} documents, {len(text):,} characters, {len(data):,} bytes")


if __name__ == "__main__":
    raise SystemExit(main())
