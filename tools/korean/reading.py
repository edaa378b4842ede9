"""Questions on passages of the Korean text, in SQuAD's format: a pattern finds a fact in a sentence and its question."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from korean.grammar import with_particle

# A sentence, in which ``answer`` is the answer, and the question about its other parts; {name:particle} adds a particle.
_FACTS = [
    (re.compile(sentence), question)
    for sentence, question in (
        (r"(?P<a>\S+)[은는] 한 (?P<b>\S+)에 (?P<answer>\S+ 원)이었다\.", "{a:은} 한 {b}에 얼마였을까?"),
        (r"(?P<a>\S+)[은는] (?P<answer>\S+)에 있는 도시이다\.", "{a:은} 어디에 있는 도시일까?"),
        (r"(?P<a>\S+)[은는] 흔히 (?P<answer>.+)에 둔다\.", "{a:은} 흔히 어디에 둘까?"),
        (r"(?P<a>\S+)[은는] (?P<answer>\S+?)(?:으로|로) 만든다\.", "{a:은} 무엇으로 만들까?"),
        (r"(?P<a>\S+)[은는] (?P<b>.+)에서 (?P<answer>\S+)[을를] 먹고 산다\.", "{a:은} {b}에서 무엇을 먹고 살까?"),
        (r"(?P<a>\S+)[은는] (?P<answer>.+)에서 (?P<b>\S+)[을를] 먹고 산다\.", "{a:은} 어디에서 {b:을} 먹고 살까?"),
        (r"(?P<a>\S+)의 (?P<b>\S+) 기온은 (?P<answer>.+ 도)로 어제보다 \S+\.", "{a}의 {b} 기온은 몇 도였을까?"),
        (r"경기는 (?P<answer>\S+ 시)에 시작되어 .+", "경기는 몇 시에 시작되었을까?"),
        (r"경기는 \S+ 시에 시작되어 (?P<answer>.+) 동안 이어졌다\.", "경기는 얼마 동안 이어졌을까?"),
        (r"(?P<a>\S+)[을를] 할 때에는 (?P<answer>\S+)[이가] 필요하다\.", "{a:을} 할 때에는 무엇이 필요할까?"),
        (
            r"\S+에 (?P<a>\S+)[은는] \S+[과와] 함께 (?P<answer>\S+?)(?:으로|로) 여행을 떠났다\.",
            "{a:은} 어디로 여행을 떠났을까?",
        ),
        (
            r"\S+에 (?P<a>\S+)[은는] (?P<answer>\S+)[과와] 함께 (?P<b>\S+?)(?:으로|로) 여행을 떠났다\.",
            "{a:은} 누구와 함께 {b:으로} 여행을 떠났을까?",
        ),
        (
            r"(?P<answer>\S+)[은는] 커서 (?P<a>\S+)[이가] 되고 싶어 한다\.",
            "커서 {a:이} 되고 싶어 하는 사람은 누구일까?",
        ),
        (r"(?P<a>\S+)[은는] 커서 (?P<answer>\S+)[이가] 되고 싶어 한다\.", "{a:은} 커서 무엇이 되고 싶어 할까?"),
    )
]
_SLOT = re.compile(r"\{(\w)(?::(\S+?))?\}")
_MOST = 36  # questions by a pattern
_EVERY = 5  # the questions on every fifth document are in the dev set


def questions(documents: Sequence[list[str]]) -> dict[str, dict[str, Any]]:
    """The training set and the dev set. A passage is a sentence with the one before and the two after it; a document
    gives at most one question."""
    sets: dict[str, list[Any]] = {"train": [], "dev": []}
    asked: Counter[str] = Counter()
    for number, lines in enumerate(documents):
        # The pattern with the fewest questions so far, so that all occur.
        fact = min(_facts(lines), key=lambda fact: asked[fact[1]], default=None)
        if fact is None or asked[fact[1]] == _MOST:
            continue
        index, pattern, question, answer, place = fact
        asked[pattern] += 1
        before = lines[max(0, index - 1) : index]
        start = sum(len(line) + 1 for line in before) + place
        row = {"id": f"{number}", "question": question, "answers": [{"text": answer, "answer_start": start}]}
        passage = " ".join([*before, *lines[index : index + 3]])
        part = "dev" if number % _EVERY == 0 else "train"
        sets[part].append({"title": str(number), "paragraphs": [{"context": passage, "qas": [row]}]})
    return {part: {"version": "1.1", "data": rows} for part, rows in sets.items()}


def _facts(lines: Sequence[str]) -> Iterator[tuple[int, str, str, str, int]]:
    """Line, pattern, question, answer and its place in the line."""
    for index, line in enumerate(lines):
        for pattern, question in _FACTS:
            if match := pattern.fullmatch(line):
                parts = match.groupdict()

                def filled(slot: re.Match[str], parts: dict[str, str] = parts) -> str:
                    word = parts[slot[1]]
                    return word if slot[2] is None else with_particle(word, slot[2])

                yield index, question, _SLOT.sub(filled, question), match["answer"], match.start("answer")
