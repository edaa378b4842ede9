"""Labelled files: each format as it is published, and errors for everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fasttfm.data import DataError
from fasttfm.data.choice_files import read_choices
from fasttfm.data.question_files import read_questions
from fasttfm.data.task_files import (
    Answer,
    ChoiceExample,
    Columns,
    QuestionExample,
    TagExample,
    TextExample,
    read_conll,
    read_texts,
)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "file"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# ---- GLUE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "example"),
    [
        ("SST-2", "sentence\tlabel\nit 's good \t1\n", TextExample("it 's good ", None, "1")),
        ("SST-2 test", "index\tsentence\n0\tgood\n", TextExample("good", None, None)),
        ("CoLA", "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tRode the.\n", TextExample("The sailors rode.", None, "1")),
        (
            "MRPC",
            '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tHe said " so .\tSo he said .\r\n',
            TextExample('He said " so .', "So he said .", "1"),
        ),
        (
            "QQP",
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tWhy?\tWhy so?\t0\n",
            TextExample("Why?", "Why so?", "0"),
        ),
        (
            "QNLI",
            "index\tquestion\tsentence\tlabel\n0\tWhen?\tIn 1851.\tentailment\n",
            TextExample("When?", "In 1851.", "entailment"),
        ),
        (
            "RTE",
            "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n",
            TextExample("A.", "B.", "not_entailment"),
        ),
        (
            "MNLI",
            "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA\tB\tx\tneutral\n",
            TextExample("A", "B", "neutral"),
        ),
        ("STS-B", "index\tgenre\tsentence1\tsentence2\tscore\n0\tnews\tA\tB\t4.5\n", TextExample("A", "B", "4.5")),
    ],
)
def test_glue(tmp_path: Path, name: str, text: str, example: TextExample) -> None:
    examples = read_texts(write(tmp_path, text))
    assert examples[0] == example
    assert len(examples) == (2 if name == "CoLA" else 1)


def test_glue_with_broken_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "sentence\tlabel\ngood\t1\nbroken\nbad\t0\n")
    with pytest.raises(DataError, match="file, line 3: expected 2 columns, got 1"):
        read_texts(path)
    assert [example.label for example in read_texts(path, skip_broken=True)] == ["1", "0"]


# ---- CoNLL -----------------------------------------------------------------------------------------------------------


def test_conll(tmp_path: Path) -> None:
    text = "-DOCSTART- -X- -X- O\n\nAhab NNP B-NP B-PER\nsails VBZ B-VP O\n\n\nNantucket NNP B-NP B-LOC\n"
    expected = [TagExample(["Ahab", "sails"], ["B-PER", "O"]), TagExample(["Nantucket"], ["B-LOC"])]
    assert read_conll(write(tmp_path, text)) == expected
    assert read_conll(write(tmp_path, text.replace(" ", "\t"))) == expected
    assert read_conll(write(tmp_path, text), Columns(label="2"))[0].tags == ["NNP", "VBZ"]


# ---- SQuAD -----------------------------------------------------------------------------------------------------------


def squad(**question: Any) -> dict[str, Any]:
    asked = {"id": "7", "question": "Who?", "answers": [{"text": "Ahab", "answer_start": 3}], **question}
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "So Ahab sails", "qas": [asked]}]}]}


def test_squad(tmp_path: Path) -> None:
    (first,) = read_questions(write(tmp_path, json.dumps(squad())))
    assert first == QuestionExample("7", "Who?", "So Ahab sails", [Answer("Ahab", 3)], False)
    (second,) = read_questions(write(tmp_path, json.dumps(squad(is_impossible=True, answers=[]))))
    assert second.impossible
    assert second.answers == []
    plausible = squad(is_impossible=True, answers=[], plausible_answers=[{"text": "So", "answer_start": 0}])
    assert read_questions(write(tmp_path, json.dumps(plausible))) == [second]


# ---- SWAG ------------------------------------------------------------------------------------------------------------


def test_swag(tmp_path: Path) -> None:
    header = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    text = header + '0,v,1,"He sails, He","He sails, then",He,gold,a,"b, ""c""",d,"e\nf",1\n'
    expected = ChoiceExample("He sails, then", "He", ["a", 'b, "c"', "d", "e\nf"], 1)
    assert read_choices(write(tmp_path, text)) == [expected]
    without = header.replace(",label", "") + "0,v,1,s,s,t,gold,a,b,c,d\n"
    assert read_choices(write(tmp_path, without))[0].label is None


@pytest.mark.parametrize("names", [("query", "document"), ("query", "passage"), ("anchor", "positive")])
def test_pairs_with_the_columns_of_similarity(names: tuple[str, str], tmp_path: Path) -> None:
    path = write(tmp_path, "\t".join([*names, "score"]) + "\nships\ta fleet\t4.5\n")
    assert read_texts(path) == [TextExample("ships", "a fleet", "4.5")]


def test_columns_without_a_header(tmp_path: Path) -> None:
    without = Columns(header=False)
    assert read_texts(write(tmp_path, "a\tx\nb\ty\n"), without) == [
        TextExample("a", None, "x"),
        TextExample("b", None, "y"),
    ]
    assert read_texts(write(tmp_path, "a\tb\tx\n"), without) == [TextExample("a", "b", "x")]
    assert read_texts(write(tmp_path, "a\nb\n"), without) == [
        TextExample("a", None, None),
        TextExample("b", None, None),
    ]
    four = write(tmp_path, "a\tb\tc\td\n")
    with pytest.raises(
        DataError, match=r"line 1: expected up to three columns without a header: .*, got 4; --text-column"
    ):
        read_texts(four, without)
    assert read_texts(four, Columns("4", None, "1", header=False)) == [TextExample("d", None, "a")]
    with pytest.raises(DataError, match=r"line 1: expected a header .* --no-header says that this line is an example"):
        read_texts(four)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_texts, "", "file: expected a header line and examples, got an empty file"),
        (
            read_texts,
            "words\tclass\na\tb\n",
            "line 1: expected a header with the columns 'sentence1' and 'sentence2'; ",
        ),
        (read_texts, "sentence\tlabel\n", "expected examples after the header line, got none"),
        (read_texts, b"sentence\tlabel\n\xff\t1\n", "line 2: expected UTF-8 text, got byte 0xff"),
        (read_texts, "text,label,text\na,1,b\n", "line 1: expected one column 'text', got 2 of that name"),
        (read_texts, "text\tlabel\tlabel\na\t1\t0\n", "line 1: expected one column 'label', got 2 of that name"),
        (read_texts, '{"text": "\\ud800", "label": 1}\n', "line 1: expected UTF-8 text, got half of a surrogate pair"),
        (read_texts, '{"text": "a", "label": NaN}\n', "line 1: expected a text or a number as label, got nan"),
        (lambda path: read_texts(path, Columns(text="²")), "text,label\na,1\n", "expected a column '²', got 'text'"),
        (read_conll, "", "expected words with tags, one per line, got none"),
        (read_conll, "Ahab B-PER\nsails\n", "line 2: expected 2 columns, as in the previous lines, got 'sails'"),
        (read_conll, "Ahab\n", "line 1: expected a word and a tag, got 'Ahab'"),
        (
            read_questions,
            "{\n{",
            r"file, line 2: expected JSON of questions in the format of SQuAD.*got '{' \(Expecting prop",
        ),
        (
            read_questions,
            "why\tbecause\n",
            r"file, line 1: expected JSON of .*got 'why\\tbecause' \(Expecting value, col",
        ),
        (read_questions, "", "file, line 1: expected JSON of questions .*, got an empty file"),
        (read_questions, "[]", "file, the file: expected an object with 'data', got list"),
        (read_questions, "{}", "file, the file: expected a list 'data', got an empty object"),
        (read_questions, '{"data": []}', "expected questions, got none"),
        (read_questions, json.dumps({"data": [{}]}), r"file, data\[0\]: expected a list 'paragraphs'"),
        (
            read_questions,
            json.dumps(squad(question=1)),
            r"data\[0\]\.paragraphs\[0\]\.qas\[0\]: expected a text 'question', got 1",
        ),
        (
            read_questions,
            json.dumps(squad(answers=[{"text": "Ahab", "answer_start": 4}])),
            r"qas\[0\]\.answers\[0\]: expected 'Ahab' at character 4 of the context, got 'hab '",
        ),
        (
            read_questions,
            json.dumps({"data": [{"paragraphs": [{"context": "So", "qas": ["Who?"]}]}]}),
            r"qas\[0\]: expected an object with 'question', got str",
        ),
        (read_choices, "", "expected a header line and examples, got an empty file"),
        (read_choices, "a,b\n1,2\n", "line 1: expected a header with 'sent1', 'sent2', 'ending0'"),
        (read_choices, "sent1,sent2,ending0,ending1,label\na,b,c,d\n", "line 2: expected 5 columns, got 4"),
        (read_choices, "sent1,sent2,ending0,ending1,label\na,b,c,d,2\n", "line 2: expected a label of 0, 1, got '2'"),
        (
            read_choices,
            'sent1,sent2,ending0,ending1,label\na,b,"c,d,2\n',
            'line 2: expected a closing " for each opening one, got the end',
        ),
    ],
)
def test_foreign_files(tmp_path: Path, read: Callable[[Path], Any], text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path, text))


def test_a_long_text_of_a_csv_file(tmp_path: Path) -> None:
    """The csv module's own limit is 131,072 characters."""
    text = "word " * 40000
    assert read_texts(write(tmp_path, f"text,label\n{text},1\n")) == [TextExample(text, None, "1")]


def test_repeated_columns_are_allowed_if_they_are_not_read(tmp_path: Path) -> None:
    assert read_texts(write(tmp_path, "text,a,a,label\nx,1,2,3\n")) == [TextExample("x", None, "3")]


def test_no_file(tmp_path: Path) -> None:
    for read in (read_texts, read_conll, read_questions, read_choices):
        with pytest.raises(DataError, match="none: expected a readable file, got No such file or directory"):
            read(tmp_path / "none")
