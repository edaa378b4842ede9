"""tools/make_korean.py: particles, endings, and the Korean text that ships with the package."""

from __future__ import annotations

import gzip
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from fasttfm import data
from fasttfm.data.commonsense import read_commonsense
from fasttfm.data.graphs import PathFinder, read_graph
from fasttfm.data.grounding import Grounder
from fasttfm.data.question_files import read_questions

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def grammar(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("korean.grammar")


@pytest.fixture
def writing(grammar: ModuleType) -> ModuleType:
    return importlib.import_module("korean.writing")


def test_particles(grammar: ModuleType) -> None:
    for word, form, found in (
        *(("꽃", "이", "꽃이"), ("나무", "이", "나무가"), ("삽", "으로", "삽으로"), ("연필", "으로", "연필로")),
        *(("배", "으로", "배로"), ("물", "을", "물을"), ("너", "에게", "너에게"), ("노래", "이었다", "노래였다")),
    ):
        assert grammar.with_particle(word, form) == found
    assert grammar.particle("심청전", "을") == "을"


@pytest.mark.parametrize(
    ("predicate", "forms"),
    [
        ("먹다", {"었다": "먹었다", "다": "먹는다", "ㄹ": "먹을", "면": "먹으면", "습니다": "먹습니다"}),
        (
            "만들다",
            {"었다": "만들었다", "다": "만든다", "는": "만드는", "ㄹ": "만들", "면": "만들면", "습니다": "만듭니다"},
        ),
        ("돕다", {"었다": "도왔다", "다": "돕는다", "ㄹ": "도울", "면": "도우면"}),
        ("굽다", {"어서": "구워서", "는": "굽는", "려고": "구우려고"}),
        ("입다", {"어서": "입어서", "면": "입으면"}),
        ("길을 걷다", {"었다": "길을 걸었다", "면": "길을 걸으면", "는": "길을 걷는"}),
        ("빨래를 걷다", {"었다": "빨래를 걷었다"}),
        ("짓다", {"어": "지어", "면": "지으면", "ㄹ": "지을", "다": "짓는다"}),
        ("고르다", {"었다": "골랐다"}),
        ("부르다", {"었다": "불렀다"}),
        ("들르다", {"었다": "들렀다"}),
        ("모으다", {"었다": "모았다"}),
        ("뜨다", {"었다": "떴다"}),
        ("눈을 뜨다", {"었다": "눈을 떴다"}),
        ("마시다", {"었다": "마셨다", "다": "마신다"}),
        ("되다", {"었다": "됐다"}),
        ("일하다", {"었다": "일했다", "는": "일하는"}),
        ("춥다", {"다": "춥다", "는": "추운", "었다": "추웠다"}),
        ("길다", {"ㄴ": "긴", "다고": "길다고"}),
        ("있다", {"는": "있는", "다는": "있다는"}),
    ],
)
def test_endings(grammar: ModuleType, predicate: str, forms: dict[str, str]) -> None:
    assert {ending: grammar.with_ending(predicate, ending) for ending in forms} == forms


def test_the_shipped_text_is_what_the_generator_writes(writing: ModuleType) -> None:
    shipped = gzip.decompress((data.shipped_corpus("korean") / "written.txt.gz").read_bytes()).decode()
    subjects = writing.read_subjects(TOOLS / "korean" / "subjects.txt")
    first = ["\n".join(lines) for lines in writing.documents(subjects, 0, 60_000)]
    assert shipped.split("\n\n")[: len(first)] == first
    assert {subject.name for subject in subjects} >= {"school", "garden", "animals", "jobs", "health"}
    other = ["\n".join(lines) for lines in writing.documents(subjects, 1, 60_000)]
    assert len(set(first) & set(other)) == 0


def test_the_shipped_text() -> None:
    path = data.shipped_corpus("korean") / "written.txt.gz"
    documents = list(data.read_documents(path))
    text = "\n".join(documents)
    assert len(text.encode()) > 1_200_000
    assert path.stat().st_size < 300_000
    lines = text.splitlines()
    assert len(set(lines)) > 10_000
    assert all(re.search(r"[.?!]$|에게\.$", line) for line in lines)
    assert not re.findall(r"[{}\[\]|/*]|[a-z]", text)  # nothing of the templates is left


def test_a_list_with_a_missing_field_is_refused(writing: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "subjects.txt"
    path.write_text("[zoo]\nanimal(name, home) = 곰/산, 고래\n{animal:은} 산다.\n")
    with pytest.raises(ValueError, match=r"animal: expected entries of 2 fields, got .*고래"):
        writing.read_subjects(path)


def test_the_shipped_questions_have_paths() -> None:
    folder = data.shipped_corpus("korean")
    graph = read_graph(folder / "commonsense-graph.tsv")
    grounder, finder = Grounder(graph.concepts), PathFinder(graph)
    sets = [read_commonsense(folder / f"commonsense-{part}.jsonlines") for part in ("train", "dev")]
    assert len(sets[0]) > 2 * len(sets[1]) > 80
    for example in sets[0] + sets[1]:
        (right,) = grounder.ground(example.endings[example.label or 0])[:1]
        assert any(finder.find(concept, right) for concept in grounder.ground(example.context)), example


def test_the_shipped_questions_on_passages(writing: ModuleType) -> None:
    """They are those of the generator; passages are in the text, answers in them, and both sets have other ones."""
    folder = data.shipped_corpus("korean")
    text = gzip.decompress((folder / "written.txt.gz").read_bytes()).decode()
    made = importlib.import_module("korean.reading").questions([each.splitlines() for each in text.split("\n\n")])
    assert {part: json.loads((folder / f"qa-{part}.json").read_text()) for part in made} == made
    train, dev = (read_questions(folder / f"qa-{part}.json") for part in ("train", "dev"))
    assert len(train) > 3 * len(dev) > 240
    assert not {each.context for each in train} & {each.context for each in dev}
    joined = text.replace("\n", " ")
    for example in train + dev:
        assert example.context in joined
        (answer,) = example.answers
        assert example.context[answer.start :].startswith(answer.text)
        assert example.question.endswith("까?")
        assert "{" not in example.question


def test_a_question_is_about_the_sentence_that_has_its_answer(writing: ModuleType) -> None:
    lines = ["안녕.", "곰은 깊은 산에서 꿀을 먹고 산다.", "곰은 크다.", "끝.", "다음."]
    made = importlib.import_module("korean.reading").questions([lines, lines, ["질문이 없는 글이다."]])
    (first,), (second,) = ([each["paragraphs"][0] for each in made[part]["data"]] for part in ("dev", "train"))
    assert first["context"] == "안녕. 곰은 깊은 산에서 꿀을 먹고 산다. 곰은 크다. 끝."
    assert (first["qas"][0]["question"], first["qas"][0]["answers"]) == (
        "곰은 깊은 산에서 무엇을 먹고 살까?",
        [{"text": "꿀", "answer_start": first["context"].index("꿀")}],
    )
    asked = second["qas"][0]
    assert (asked["question"], asked["answers"][0]["text"]) == ("곰은 어디에서 꿀을 먹고 살까?", "깊은 산")
