"""A small graph of concepts and questions about it, from the word lists of ``subjects.txt``."""

from __future__ import annotations

import json

import numpy as np
from korean.grammar import with_particle
from korean.writing import Subject

# subject, list, field: the relation, and the question about it.
ASKED = {
    ("things", "item", "kind"): ("IsA", None),
    ("things", "item", "place"): ("AtLocation", "{} 어디에 있을까?"),
    ("things", "item", "use"): ("UsedFor", "{} 무엇을 할 때 쓸까?"),
    ("things", "item", "made"): ("MadeOf", "{} 무엇으로 만들까?"),
    ("animals", "animal", "kind"): ("IsA", None),
    ("animals", "animal", "home"): ("AtLocation", "{} 어디에서 살까?"),
    ("animals", "animal", "food"): ("Desires", "{} 무엇을 먹을까?"),
    ("jobs", "job", "place"): ("AtLocation", "{} 어디에서 일할까?"),
    ("jobs", "job", "tool"): ("Uses", "{} 어떤 물건을 쓸까?"),
    ("jobs", "job", "verb"): ("CapableOf", "{} 무슨 일을 할까?"),
    ("garden", "tool", "use"): ("UsedFor", None),
}
# The flower, the soil and the shovel.
EDGES = (
    ("AtLocation", "꽃", "흙"),
    ("AtLocation", "흙", "정원"),
    ("AtLocation", "꽃", "정원"),
    ("HasPrerequisite", "꽃을 심다", "흙을 파다"),
    ("UsedFor", "흙", "꽃을 심다"),
)


def graph_and_questions(subjects: list[Subject], seed: int) -> tuple[list[str], dict[str, list[str]]]:
    """The lines of an edge file, and of the questions of both sets; every fourth thing is only in the dev set."""
    named = {subject.name: subject for subject in subjects}
    random = np.random.Generator(np.random.Philox(key=seed))
    edges, sets = dict.fromkeys(EDGES), {"train": [], "dev": []}
    for (subject, name, part), (relation, question) in ASKED.items():
        rows = named[subject].lists[name]
        edges |= dict.fromkeys((relation, row["name"], row[part]) for row in rows)
        for number, row in enumerate(rows if question is not None else ()):
            others = sorted({thing[part] for thing in rows if thing["name"] != row["name"]} - {row[part]})
            choices = [row[part], *map(str, random.choice(others, 4, replace=False))]
            order = random.permutation(5).tolist()
            listed = [{"label": "ABCDE"[at], "text": choices[choice]} for at, choice in enumerate(order)]
            stem = str(question).format(with_particle(row["name"], "은"))
            asked = {"question_concept": row["name"], "choices": listed, "stem": stem}
            key = "ABCDE"[order.index(0)]
            line = json.dumps(
                {"answerKey": key, "id": f"{name}-{number}-{part}", "question": asked}, ensure_ascii=False
            )
            sets["dev" if number % 4 == 3 else "train"].append(line)
    return ["\t".join(edge).replace(" ", "_") for edge in edges], sets
