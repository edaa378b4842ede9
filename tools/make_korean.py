"""Makes the Korean texts that ship with fasttfm: ``python tools/make_korean.py``.

The texts in the public domain are in korean/public_domain.py; the others are written from the word lists and sentences
of korean/subjects.txt. The output is deterministic.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from pathlib import Path

from korean.public_domain import DOCUMENTS
from korean.questions import graph_and_questions
from korean.reading import questions as reading_questions
from korean.writing import documents, read_subjects

from fasttfm.data.sentences import sentence_starts

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "python" / "fasttfm" / "data" / "languages" / "korean"
SIZE = 1_250_000  # bytes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes the Korean texts that ship with fasttfm.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: languages/korean in the package's data")
    parser.add_argument("--seed", type=int, default=0, help="of the written documents (default: 0)")
    parsed = parser.parse_args(arguments)
    parsed.output.mkdir(parents=True, exist_ok=True)
    quoted = [sentences(text) for text in DOCUMENTS]
    (parsed.output / "public-domain.txt").write_text(joined(quoted), encoding="utf-8")
    subjects = read_subjects(HERE / "korean" / "subjects.txt")
    edges, questions = graph_and_questions(subjects, parsed.seed)
    for name, lines in (("graph.tsv", edges), *((f"{part}.jsonlines", rows) for part, rows in questions.items())):
        (parsed.output / f"commonsense-{name}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    written = list(documents(subjects, parsed.seed, SIZE))
    for part, rows in reading_questions(written).items():
        text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
        (parsed.output / f"qa-{part}.json").write_text(text + "\n", encoding="utf-8")
    text = joined(written).encode()
    data = gzip.compress(text, 9, mtime=0)
    (parsed.output / "written.txt.gz").write_bytes(data)
    print(f"{len(written)} documents, {sum(map(len, written)):,} sentences, {len(text):,} bytes, {len(data):,} packed")
    return 0


def sentences(text: str) -> list[str]:
    starts = [0, *sentence_starts(text), len(text)]
    return [" ".join(text[low:high].split()) for low, high in itertools.pairwise(starts)]


def joined(texts: list[list[str]]) -> str:
    """One sentence or verse per line, and a blank line between documents."""
    return "\n\n".join("\n".join(line for line in lines if line) for lines in texts) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
