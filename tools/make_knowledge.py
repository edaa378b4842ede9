"""Makes the small knowledge graph that ships with fasttfm, and the texts that mention its entities.

    python tools/make_knowledge.py

Places are found by their names in the shipped State of the Union addresses (make_corpus.py); corpus_places.py lists
them. The output is deterministic. The dev sets are about places that do not occur in the training sets, so that a model
knows them only from the graph.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import corpus_places as places
import numpy as np

CORPUS = Path(__file__).resolve().parent.parent / "python" / "fasttfm" / "data" / "corpus"
LONGEST, CLAUSE = 260, 160  # characters of a passage, and of the context of two mentions
REGIONS = {place: region for region, names in places.CONTINENTS.items() for place in names.split()}
REGIONS |= dict.fromkeys(places.STATES.split(), "United States")
KINDS = {
    **{place: "state" if region == "United States" else "country" for place, region in REGIONS.items()},
    **dict.fromkeys(places.CAPITALS, "city"),
    **dict.fromkeys(places.CONTINENTS, "continent"),
    "United States": "country",
}
RELATIONS = ("part_of", "both_in_Europe", "both_in_Asia", "both_in_America", "both_in_States", "apart")
PARTS = {**REGIONS, **places.CAPITALS}  # the region or country that contains each place
_WORDS = sorted([*KINDS, *places.NAMES, *places.NOT_PLACES], key=len, reverse=True)
PLACE = re.compile(r"\b(?:" + "|".join(map(re.escape, _WORDS)) + r")\b")


class Mention(NamedTuple):
    start: int
    end: int
    entity: str

    def row(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end, "entity": self.entity}


def main() -> int:
    documents = gzip.decompress((CORPUS / "state-of-the-union.txt.gz").read_bytes()).decode().split("\n\n")
    lines = [document.split("\n") for document in documents]
    files = {
        "triples.tsv": "".join("\t".join(triple) + "\n" for triple in triples()),
        "mentions.jsonlines.gz": _json_lines(passages(lines)),
    }
    write(CORPUS / "knowledge", files)
    sentences = list(dict.fromkeys(line for part in lines for line in part))
    short = [line for line in sentences if 30 <= len(line) <= LONGEST]
    write(CORPUS / "tasks", {**relations(sentences), **types(short)})
    return 0


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        content = gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode()
        (folder / name).write_bytes(content)
        print(f"{name}: {len(text.splitlines())} lines, {len(content):,} bytes")


def mentions(text: str) -> list[Mention]:
    places_in_text = [match for match in PLACE.finditer(text) if match.group() not in places.NOT_PLACES]
    return [Mention(*match.span(), places.NAMES.get(match.group(), match.group())) for match in places_in_text]


# ---- the graph -------------------------------------------------------------------------------------------------------


def triples() -> list[tuple[str, str, str]]:
    facts = [(place, "part_of", whole) for place, whole in PARTS.items()]
    facts += [(place, "is_a", kind) for place, kind in KINDS.items()]
    facts += [(city, "capital_of", country) for city, country in places.CAPITALS.items()]
    pairs = [pair.split("-") for pair in places.BORDERS.split()]
    return facts + [(one, "borders_on", other) for pair in pairs for one, other in (pair, pair[::-1])]


def passages(documents: list[list[str]]) -> list[dict[str, Any]]:
    """Two sentences that follow each other and mention a place."""
    rows = []
    for document in documents:
        taken = -1
        for number, (first, second) in enumerate(itertools.pairwise(document)):
            text = f"{first}\n{second}"
            if number > taken and 60 <= len(text) <= LONGEST and len(mentions(text)) > 0:
                rows.append({"text": text, "entities": [mention.row() for mention in mentions(text)]})
                taken = number + 1
    return rows


# ---- tasks -----------------------------------------------------------------------------------------------------------


def dev_places() -> set[str]:
    """Every third place of each region, and every third city."""
    groups = [names.split() for names in (*places.CONTINENTS.values(), places.STATES)] + [list(places.CAPITALS)]
    return {name for group in groups for name in sorted(group)[::3]}


def relation(head: str, tail: str) -> str:
    if PARTS.get(head) == tail:
        return "part_of"
    region, other = (PARTS.get(place, place) for place in (head, tail))
    return f"both_in_{region.split()[-1]}" if region.split()[-1] == other.split()[-1] else "apart"


def relations(sentences: list[str]) -> dict[str, str]:
    """Which of ``RELATIONS`` holds between two places of a sentence. The head is the place that is part of the other,
    or the first in the text. A sentence is in only one of the sets."""
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "dev": []}
    for text in sentences:
        first = {mention.entity: mention for mention in reversed(mentions(text))}  # of each place, the first mention
        rows_by_relation: dict[str | None, list[dict[str, Any]]] = {}
        for one, other in itertools.combinations(sorted(first.values()), 2):
            head, tail = (other, one) if PARTS.get(other.entity) == one.entity else (one, other)
            start, end = _clause(text, min(head.start, tail.start), max(head.end, tail.end))
            if end - start <= CLAUSE:
                ends = [one._replace(start=one.start - start, end=one.end - start).row() for one in (head, tail)]
                label = relation(head.entity, tail.entity)
                row = {"text": text[start:end], "head": ends[0], "tail": ends[1], "label": label}
                rows_by_relation.setdefault(_part(head.entity, tail.entity), []).append(row)
        part = "dev" if "dev" in rows_by_relation else "train"
        rows[part] += rows_by_relation.get(part, [])
    return {f"relation-{part}.jsonlines": _json_lines(_balanced(part_rows, part)) for part, part_rows in rows.items()}


def _clause(text: str, start: int, end: int) -> tuple[int, int]:
    """The context of two mentions: whole words, up to 25 characters on either side."""
    low, high = max(0, start - 25), min(len(text), end + 25)
    low = text.rfind(" ", 0, low) + 1
    following = text.find(" ", high)
    return low, len(text) if following < 0 else following


def _part(*names: str) -> str | None:
    """The set for examples of these places: regions are in both, other places in one of them."""
    dev = {name in dev_places() for name in names if name not in REGIONS.values()}
    return None if len(dev) != 1 else "dev" if dev.pop() else "train"


def _balanced(rows: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """Shuffles the examples and limits the number for each label of RELATIONS; other labels are dropped."""
    random = np.random.Generator(np.random.Philox(key=5))
    by_label: dict[str, list[dict[str, Any]]] = {}
    for number in random.permutation(len(rows)):
        by_label.setdefault(rows[number]["label"], []).append(rows[number])
    chosen = [row for label in RELATIONS for row in by_label.get(label, [])[: {"train": 60, "dev": 20}[part]]]
    return [chosen[number] for number in random.permutation(len(chosen))]


def types(sentences: list[str]) -> dict[str, str]:
    """The kind of place of a mention, and its region."""
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "dev": []}
    seen: dict[str, int] = {}
    for text in sentences:
        text_mentions = mentions(text)
        for mention in text_mentions:
            place = mention.entity
            if KINDS[place] == "continent" or place == "United States" or seen.get(place, 0) >= 8:
                continue
            seen[place] = seen.get(place, 0) + 1
            region = REGIONS.get(PARTS[place], PARTS[place])  # of a city, the region of its country
            labels = ["place", KINDS[place], f"in {region}"]
            if part := _part(place):
                rows[part].append({"text": text, "mention": mention.row(), "labels": labels})
    random = np.random.Generator(np.random.Philox(key=6))
    most = {"train": 320, "dev": 80}
    files = {}
    for part, part_rows in rows.items():
        order = random.permutation(len(part_rows))[: most[part]]
        files[f"entity-typing-{part}.jsonlines"] = _json_lines([part_rows[number] for number in order])
    return files


def _json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
