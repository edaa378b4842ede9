"""Files in the layouts in which benchmarks are published, each with a few lines, and tables of any kind."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from fasttfm.data import DataError
from fasttfm.data.choice_files import read_choices
from fasttfm.data.question_files import read_questions
from fasttfm.data.task_files import Answer, ChoiceExample, Columns, TagExample, TextExample, read_conll, read_texts


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return path


# ---- texts -----------------------------------------------------------------------------------------------------------

MNLI = [
    *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse"),
    *("sentence2_parse", "sentence1", "sentence2", "label1", "gold_label"),
]
STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"]
SNLI = [
    *("gold_label", "sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse"),
    *("sentence1", "sentence2", "captionID", "pairID", "label1"),
]


def table(header: list[str], *rows: list[str]) -> str:
    return "".join("\t".join(row) + "\n" for row in (header, *rows))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("MNLI", table(MNLI, [*"0abcdefg", "A.", "B.", "x", "neutral"]), TextExample("A.", "B.", "neutral")),
        ("STS-B", table(STSB, [*"0abcdef", "A.", "B.", "5.000"]), TextExample("A.", "B.", "5.000")),
        ("SNLI", table(SNLI, ["neutral", *"abcd", "A.", "B.", *"123"]), TextExample("A.", "B.", "neutral")),
        (
            "MRPC",
            '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tA " b .\tC .\n',
            TextExample('A " b .', "C .", "0"),
        ),
        (
            "NSMC",
            "id\tdocument\tlabel\n9976970\t아 더빙.. 진짜 짜증나네요\t0\n",
            TextExample("아 더빙.. 진짜 짜증나네요", None, "0"),
        ),
    ],
)
def test_tsv(tmp_path: Path, name: str, text: str, expected: TextExample) -> None:
    assert read_texts(write(tmp_path, "train.tsv", text)) == [expected]


def test_skipped_lines_are_counted(tmp_path: Path) -> None:
    """QQP's broken lines, and SNLI's examples without a gold label."""
    qqp = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tB?\t0\n1\t1\tA?\n2\t1\t2\tC?\tD?\t1\n"
    with pytest.warns(UserWarning, match=r"train\.tsv: 1 lines that do not have 6 columns are left out"):
        examples = read_texts(write(tmp_path, "train.tsv", qqp))
    assert [example.label for example in examples] == ["0", "1"]
    rows = [{"gold_label": label, "sentence1": "A", "sentence2": "B"} for label in ("-", "neutral")]
    path = write(tmp_path, "snli_1.0_dev.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="1 examples without an agreed label are left out"):
        assert read_texts(path) == [TextExample("A", "B", "neutral")]


def test_klue(tmp_path: Path) -> None:
    sts = [
        {
            "guid": "x",
            "sentence1": "가",
            "sentence2": "나",
            "labels": {"label": 3.7, "real-label": 3.714, "binary-label": 1},
        }
    ]
    path = write(tmp_path, "klue-sts-v1.1_train.json", sts)
    assert read_texts(path) == [TextExample("가", "나", "3.7")]
    assert read_texts(path, Columns(label="labels.binary-label"))[0].label == "1"
    nli = [{"guid": "x", "source": "s", "premise": "가", "hypothesis": "나", "gold_label": "entailment", "author": "a"}]
    nli[0] |= {"label2": "neutral", "label3": "entailment", "label4": "neutral", "label5": "entailment"}
    assert read_texts(write(tmp_path, "nli.json", nli)) == [TextExample("가", "나", "entailment")]
    ynat = [{"guid": "x", "title": "유튜브 내달 2일까지", "predefined_news_category": "IT과학", "label": "생활문화"}]
    ynat[0] |= {"annotations": {"annotators": ["08"], "annotations": {}}, "url": "https://n", "date": "2016.06.30."}
    assert read_texts(write(tmp_path, "ynat.json", ynat)) == [TextExample("유튜브 내달 2일까지", None, "생활문화")]
    ner = "## 토큰, 레이블 구분자 : \\t\n## 토큰 구분자 : \\n\n## 문장 구분자 : \\n\\n\n## 주석 : ##\n"
    ner += "## 컬럼명 : CHAR\tNE_TAG\n"
    ner += "## klue-ner-v1_train_00000-nsmc\t<특히:OG>\n특\tB-OG\n히\tI-OG\n \tO\n김\tB-PS\n"
    ner += "\n## klue-ner-v1_train_00001-nsmc\t<x>\n##\tO\n아\tO\n"
    expected = [TagExample(["특", "히", "김"], ["B-OG", "I-OG", "B-PS"]), TagExample(["##", "아"], ["O", "O"])]
    assert read_conll(write(tmp_path, "klue-ner-v1.1_train.tsv", ner)) == expected
    asked = {"question": "누구?", "answers": [{"text": "김", "answer_start": 0}], "guid": "k7", "question_type": 1}
    none = {**asked, "guid": "k8", "answers": [], "plausible_answers": asked["answers"], "is_impossible": True}
    paragraph = {"context": "김 씨", "qas": [{**asked, "is_impossible": False}, none]}
    news = {"title": "t", "news_category": "기획", "source": "hankyung", "paragraphs": [paragraph]}
    answerable, impossible = read_questions(write(tmp_path, "mrc.json", {"version": "klue-mrc-v1.1", "data": [news]}))
    assert (answerable.id, answerable.answers) == ("k7", [Answer("김", 0)])
    assert (impossible.id, impossible.answers, impossible.impossible) == ("k8", [], True)


def test_klue_mrc_of_the_hub(tmp_path: Path) -> None:
    """Questions without an answer have plausible ones, and answers have lost the spaces around them."""
    row = {"guid": "k7", "context": "또 김 씨", "question": "누구?", "is_impossible": False}
    rows = [
        {**row, "answers": {"answer_start": [1], "text": ["김"]}},
        {**row, "answers": {"answer_start": [2], "text": ["김"]}, "is_impossible": True},
    ]
    path = write(tmp_path, "mrc.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    answerable, impossible = read_questions(path)
    assert (answerable.id, answerable.answers, answerable.impossible) == ("k7", [Answer("김", 2)], False)
    assert (impossible.answers, impossible.impossible) == ([], True)


# ---- any table -------------------------------------------------------------------------------------------------------


def test_columns_by_name_and_number(tmp_path: Path) -> None:
    path = write(tmp_path, "reviews.csv", 'stars,Review Text,title\n5,"good, ""really""",A\n1,bad,B\n')
    assert read_texts(path)[0] == TextExample("A", None, "5")
    assert read_texts(path, Columns(text="Review Text"))[0] == TextExample('good, "really"', None, "5")
    assert read_texts(path, Columns(text="2", pair="3", label="1"))[1] == TextExample("bad", "B", "1")
    with pytest.raises(
        DataError, match=r"reviews\.csv, line 1: expected a column 'body', got 'stars', 'Review Text', 'title'"
    ):
        read_texts(path, Columns(text="body"))
    news = write(tmp_path, "news.csv", '"3","Title","Body, long"\n"4","Other","More"\n')
    assert read_texts(news, Columns("2", "3", "1", header=False)) == [
        TextExample("Title", "Body, long", "3"),
        TextExample("Other", "More", "4"),
    ]
    capitals = write(tmp_path, "capitals.csv", "Text,Label\na,x\n")
    assert read_texts(capitals) == [TextExample("a", None, "x")]
    semicolons = write(tmp_path, "german.csv", "text;label\nSo, nun;gut\n")
    assert read_texts(semicolons) == [TextExample("So, nun", None, "gut")]


def test_json_lines_and_lists(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": None}]
    expected = [TextExample("a", None, "1"), TextExample("b", None, None)]
    assert read_texts(write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))) == expected
    assert read_texts(write(tmp_path, "a.json", rows)) == expected
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: expected a text in 'text', got 7"):
        read_texts(write(tmp_path, "b.jsonl", '{"text": "a"}\n{"text": 7}\n'))
    with pytest.raises(DataError, match=r"b\.json, row 2: expected a text in 'text', got 'body'"):
        read_texts(write(tmp_path, "b.json", [{"text": "a"}, {"body": "b"}]))


def test_data_sets_have_the_names_of_their_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="writes the files of the datasets library")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=features)
    expected = [TextExample("a", None, "pos"), TextExample("b", None, "neg"), TextExample("c", None, None)]
    rows.to_parquet(str(tmp_path / "train.parquet"))
    assert read_texts(tmp_path / "train.parquet") == expected
    rows.save_to_disk(str(tmp_path / "saved"))
    assert read_texts(tmp_path / "saved") == expected
    with pytest.raises(DataError, match="expected a file, or a folder that `datasets` has saved"):
        read_texts(tmp_path)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_conll_2000(tmp_path: Path) -> None:
    text = "Confidence NN B-NP\nin IN B-PP\n\n# # B-NP\n1 CD I-NP\n"
    expected = [TagExample(["Confidence", "in"], ["B-NP", "B-PP"]), TagExample(["#", "1"], ["B-NP", "I-NP"])]
    assert read_conll(write(tmp_path, "train.txt", text)) == expected
    assert read_conll(tmp_path / "train.txt", Columns(label="2"))[0].tags == ["NN", "IN"]


def test_conllu(tmp_path: Path) -> None:
    text = (
        "# sent_id = 1\n# text = Vámonos al mar\n"
        "1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_\n"
        "1\tVamos\tir\tVERB\tV\t_\t0\troot\t_\t_\n2\tnos\tnosotros\tPRON\tP\t_\t1\tobj\t_\t_\n"
        "2.1\t_\t_\tNOUN\t_\t_\t_\t_\t_\t_\n3\tmar\tmar\tNOUN\tN\t_\t1\tobl\t_\t_\n\n"
    )
    path = write(tmp_path, "es-ud-train.conllu", text)
    assert read_conll(path) == [TagExample(["Vamos", "nos", "mar"], ["VERB", "PRON", "NOUN"])]
    assert read_conll(path, Columns(label="xpos", text="lemma")) == [
        TagExample(["ir", "nosotros", "mar"], ["V", "P", "N"])
    ]
    with pytest.raises(DataError, match="expected a column 'tag', got id, form, lemma"):
        read_conll(path, Columns(label="tag"))


# ---- questions -------------------------------------------------------------------------------------------------------


def test_coqa(tmp_path: Path) -> None:
    story = "The white cat lived in a barn. It was happy."

    def answer(text: str, span: str, turn: int) -> dict[str, Any]:
        start = story.find(span) if span else -1
        return {
            "span_start": start,
            "span_end": start + len(span) if span else -1,
            "span_text": span,
            "input_text": text,
            "turn_id": turn,
        }

    questions = [
        {"input_text": text, "turn_id": turn} for turn, text in enumerate(("What color?", "Where?", "Glad?", "Age?"), 1)
    ]
    answers = [
        answer("White", "The white cat", 1),
        answer("in a barn", "lived in a barn", 2),
        answer("yes", "It was happy", 3),
    ]
    answers.append(answer("unknown", "", 4))
    others = [answer("Snow white", "white", 1), *answers[1:3], answer("three", "It was happy", 4)]
    example = {"source": "mctest", "id": "s1", "filename": "mc1.txt", "name": "mc1.txt", "story": story}
    example |= {"questions": questions, "answers": answers, "additional_answers": {"0": others}}
    examples = read_questions(write(tmp_path, "coqa-dev-v1.0.json", {"version": "1.0", "data": [example]}))
    assert [example.id for example in examples] == ["s1-1", "s1-2", "s1-3", "s1-4"]
    assert {example.domain for example in examples} == {"children's stories"}
    assert examples[0].answers == 2 * [Answer("white", 4)]
    assert examples[1].answers == 2 * [Answer("in a barn", story.index("in a"))]
    assert examples[2].answers == 2 * [Answer("It was happy", story.index("It"))]
    assert examples[2].question == "Glad? Where? in a barn What color? White"
    assert [question.references for question in examples] == [
        [["Snow white"], ["White"]],
        [["in a barn"], ["in a barn"]],
        [["yes"], ["yes"]],
        [["three"], [""]],
    ]
    del example["additional_answers"]
    (*_, last) = read_questions(write(tmp_path, "coqa-train-v1.0.json", {"version": "1.0", "data": [example]}))
    assert last.impossible
    assert last.references == [[""]]


def test_coqa_of_the_hub(tmp_path: Path) -> None:
    answers = {"input_text": ["white", "unknown"], "answer_start": [4, -1], "answer_end": [9, -1]}
    row = {"source": "mctest", "story": "The white cat.", "questions": ["What color?", "Age?"], "answers": answers}
    first, second = read_questions(write(tmp_path, "coqa.jsonl", json.dumps(row) + "\n"))
    assert (first.id, first.answers, first.references) == ("1-1", [Answer("white", 4)], [["white"]])
    assert (second.question, second.impossible) == ("Age? What color? white", True)
    assert first.domain == second.domain == "children's stories"
    wrong = {**row, "answers": {"input_text": ["white", "unknown"]}}
    with pytest.raises(
        DataError, match=r"line 1: expected lists of 'questions' and of their answers' input_text, answer_"
    ):
        read_questions(write(tmp_path, "coqa.jsonl", json.dumps(wrong) + "\n"))


def test_triviaqa(tmp_path: Path) -> None:
    write(tmp_path, "evidence/wikipedia/Ahab.txt", "Captain Ahab\n\nsails the Pequod.")
    row = {
        "Answer": {
            "Aliases": ["The Pequod", "Pequod"],
            "MatchedWikiEntityName": "Pequod",
            "NormalizedAliases": ["pequod"],
            "NormalizedMatchedWikiEntityName": "pequod",
            "NormalizedValue": "pequod",
            "Type": "WikipediaEntity",
            "Value": "Pequod",
        },
        "EntityPages": [{"DocSource": "TagMe", "Filename": "Ahab.txt", "Title": "Ahab"}],
        "Question": "Which ship?",
        "QuestionId": "tc_1",
        "QuestionSource": "http://www.quiz.com/",
        "SearchResults": [],
    }
    lost = {**row, "QuestionId": "tc_2", "Answer": {"Value": "Rachel", "Aliases": []}}
    path = write(tmp_path, "qa/wikipedia-train.json", {"Data": [row, lost], "Domain": "Wikipedia", "Version": 1.0})
    with pytest.warns(UserWarning, match="1 questions whose answer is in none of their documents are left out"):
        (question,) = read_questions(path)
    assert question.id == "tc_1--Ahab.txt"
    assert question.context == "Captain Ahab sails the Pequod."
    assert question.answers == [Answer("the Pequod", 19), Answer("Pequod", 23)]
    assert question.references == [["Pequod", "The Pequod", "pequod"]]
    checked = [{**row, "QuestionId": f"tc_{number}", "QuestionPartOfVerifiedEval": number == 4} for number in (3, 4)]
    verified = {"Data": checked, "Domain": "Wikipedia", "Split": "dev", "VerifiedEval": True, "Version": 1.0}
    (question,) = read_questions(write(tmp_path, "qa/verified-wikipedia-dev.json", verified))
    assert question.id == "tc_4--Ahab.txt"


def test_questions_of_rows(tmp_path: Path) -> None:
    row = {"id": "1", "question": "Who?", "context": "So Ahab", "answers": {"text": ["Ahab"], "answer_start": [3]}}
    none = {**row, "id": "2", "answers": {"text": [], "answer_start": []}}
    examples = read_questions(write(tmp_path, "a.jsonl", json.dumps(row) + "\n" + json.dumps(none) + "\n"))
    assert [(row.answers, row.impossible) for row in examples] == [([Answer("Ahab", 3)], False), ([], True)]
    wrong = {**row, "answers": {"text": ["Ahab"], "answer_start": [4]}}
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: expected 'Ahab' at character 4 of the context, got 'hab'"):
        read_questions(write(tmp_path, "a.jsonl", json.dumps(wrong) + "\n"))


# ---- choices ---------------------------------------------------------------------------------------------------------


def test_story_cloze(tmp_path: Path) -> None:
    header = "InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4,"
    header += "RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding\n"
    path = write(tmp_path, "cloze.csv", header + 'x,"A, b.",C.,D.,E.,F.,G.,2\n')
    assert read_choices(path) == [ChoiceExample("A, b. C. D. E.", "", ["F.", "G."], 1)]
    hub = {f"input_sentence_{number}": text for number, text in enumerate(("A, b.", "C.", "D.", "E."), 1)}
    hub |= {"story_id": "x", "sentence_quiz1": "F.", "sentence_quiz2": "G.", "answer_right_ending": 2}
    assert read_choices(write(tmp_path, "cloze.jsonl", json.dumps(hub) + "\n")) == read_choices(path)
    with pytest.raises(DataError, match=r"cloze\.csv, line 2: expected an AnswerRightEnding of 1, 2, got '3'"):
        read_choices(write(tmp_path, "cloze.csv", header + "x,A,B,C,D,E,F,3\n"))


def test_race(tmp_path: Path) -> None:
    passage = {
        "answers": ["C", "A"],
        "options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
        "questions": ["Who _ ?", "Why?"],
        "article": "A text.",
        "id": "high1.txt",
    }
    write(tmp_path, "train/high/1.txt", passage)
    write(tmp_path, "train/middle/2.txt", passage)
    expected = [ChoiceExample("A text.", "Who _ ?", [*"abcd"], 2), ChoiceExample("A text.", "Why?", [*"efgh"], 0)]
    assert read_choices(tmp_path / "train") == 2 * expected
    row = {"example_id": "1", "article": "A text.", "answer": "C", "question": "Who _ ?", "options": [*"abcd"]}
    assert read_choices(write(tmp_path, "race.jsonl", json.dumps(row) + "\n")) == expected[:1]
    with pytest.raises(DataError, match="expected an answer of A, B, C, D, got"):
        read_choices(write(tmp_path, "race.jsonl", json.dumps({**row, "answer": "E"}) + "\n"))
    with pytest.raises(DataError, match="expected as many 'options' and 'answers' as 'questions'"):
        read_choices(write(tmp_path, "3.txt", {**passage, "answers": ["C"]}))


def test_commonsenseqa_and_hellaswag(tmp_path: Path) -> None:
    files = {
        "answerKey": "B",
        "id": "x",
        "question": {
            "question_concept": "ship",
            "choices": [{"label": "A", "text": "a"}, {"label": "B", "text": "b"}],
            "stem": "Where?",
        },
    }
    hub = {"id": "x", "question": "Where?", "choices": {"label": ["A", "B"], "text": ["a", "b"]}, "answerKey": ""}
    path = write(tmp_path, "train_rand_split.jsonl", json.dumps(files) + "\n" + json.dumps(hub) + "\n")
    assert read_choices(path) == [
        ChoiceExample("Where?", "", ["a", "b"], 1),
        ChoiceExample("Where?", "", ["a", "b"], None),
    ]
    swag = {"ctx": "He", "endings": ["a", "b"], "label": 1}
    assert read_choices(write(tmp_path, "h.jsonl", json.dumps(swag) + "\n")) == [ChoiceExample("He", "", ["a", "b"], 1)]
    with pytest.raises(DataError, match=r"h\.jsonl, line 1: expected a label of 0, 1, got 2"):
        read_choices(write(tmp_path, "h.jsonl", json.dumps({**swag, "label": 2}) + "\n"))


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "train", "dev"),
    [
        (["train.tsv", "dev.tsv", "dev_ids.tsv", "msr_paraphrase_train.txt", "test.tsv"], ["train.tsv"], ["dev.tsv"]),
        (["train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"], ["train.tsv"], ["dev_matched.tsv"]),
        (
            ["snli_1.0_train.jsonl", "snli_1.0_train.txt", "snli_1.0_dev.txt"],
            ["snli_1.0_train.jsonl"],
            ["snli_1.0_dev.txt"],
        ),
        (["train.csv", "train_full.csv", "val.csv"], ["train.csv"], ["val.csv"]),
        (["eng.train", "eng.testa", "eng.testb"], ["eng.train"], ["eng.testa"]),
        (["KorQuAD_v1.0_train.json", "KorQuAD_v1.0_dev.json"], ["KorQuAD_v1.0_train.json"], ["KorQuAD_v1.0_dev.json"]),
        (
            [
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002.parquet",
                "data/validation-00000-of-00001.parquet",
            ],
            ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
            ["validation-00000-of-00001.parquet"],
        ),
    ],
)
def test_parts_of_folders(tmp_path: Path, names: list[str], train: list[str], dev: list[str]) -> None:
    from fasttfm.tasks.reading import part_files

    for name in names:
        write(tmp_path, name, "")
    assert [path.name for path in part_files(tmp_path, "train")] == train
    assert [path.name for path in part_files(tmp_path, "dev")] == dev


def test_parts_that_are_ambiguous(tmp_path: Path) -> None:
    from fasttfm.tasks.reading import part_files, read_examples

    for name in ("train-v1.1.json", "train-v2.0.json"):
        write(tmp_path, name, "")
    with pytest.raises(DataError, match=r"expected one file for train, got train-v1\.1\.json, train-v2\.0\.json"):
        part_files(tmp_path, "train")
    (tmp_path / "train-v1.1.json").unlink()
    with pytest.raises(ValueError, match="columns: expected with the tasks classify, pair, tag"):
        read_examples("qa", tmp_path, columns=Columns(text="x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = write(tmp_path, "few.csv", "sentence,label\n" + "".join(f"text {i},{i % 2}\n" for i in range(20)))
        examples = read_examples("classify", texts)
    assert (len(examples.train), len(examples.dev)) == (18, 2)
    assert examples.source == f"{texts}, texts in 'sentence', labels in 'label'"
    with pytest.raises(
        DataError, match=r"few\.csv: expected two texts in each example \(--pair-column names the second\)"
    ):
        read_examples("pair", texts)
