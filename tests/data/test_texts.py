"""Sources of documents: every format, every way to name files, unusual texts, and errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttfm.data import DataError, read_documents


def documents(source: Any) -> list[str]:
    return list(read_documents(source))


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n \t\r\n\r\nthree 🐋\n\n\n\nfour\x00four".encode())
    assert documents(path) == ["one\ntwo", "three 🐋", "four\x00four"]
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert documents(packed) == documents(str(path))


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n\\ntwo", "id": 1}\n\n{"text": ""}\n')
    assert documents(path) == ["one\n\ntwo", ""]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert documents(packed) == documents(path)


def test_parquet_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["one", "two 🐋"]}), path)
    assert documents(path) == ["one", "two 🐋"]
    parquet.write_table(pyarrow.table({"words": ["one"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: expected a column 'text', got columns 'words'"):
        documents(path)
    parquet.write_table(pyarrow.table({"text": ["one", None]}), path)
    with pytest.raises(DataError, match=r"row 2: expected a text in 'text', got None"):
        documents(path)
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"a\.parquet: expected a parquet file"):
        documents(path)


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(
        ImportError, match=r"reading parquet and arrow files needs pyarrow: pip install 'fasttfm\[files\]'"
    ):
        documents(tmp_path / "a.parquet")


def test_data_sets() -> None:
    datasets = pytest.importorskip("datasets")
    assert documents(datasets.Dataset.from_dict({"text": ["one", "two"], "id": [1, 2]})) == ["one", "two"]
    with pytest.raises(DataError, match="data set: expected a column 'text', got columns 'body'"):
        documents(datasets.Dataset.from_dict({"body": ["one"]}))


def test_folders_patterns_and_lists(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", "notes.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert documents(tmp_path) == ["a.txt", "b.txt", "deep/c.txt"]
    assert documents(str(tmp_path / "*.txt")) == ["a.txt", "b.txt"]
    assert documents(str(tmp_path / "**" / "*.txt")) == ["a.txt", "b.txt", "deep/c.txt"]
    assert documents([tmp_path / "deep", str(tmp_path / "a*")]) == ["deep/c.txt", "a.txt"]


def test_markup(tmp_path: Path) -> None:
    """A file is a document; lines of a paragraph are joined, headings and list items keep their lines."""
    (tmp_path / "a.md").write_text(
        "# Whales\nThey swim\nfar. Always.\n\n- one\n  more\n- two\n\n    code here\n| a | b |\n"
    )
    assert documents(tmp_path / "a.md") == [
        "# Whales\nThey swim far. Always.\n- one more\n- two\n    code here\n| a | b |"
    ]
    (tmp_path / "b.rst").write_text("Title\n=====\n\nA text\nof two lines.\n\n.. note:: x\n")
    assert documents(tmp_path / "b.rst") == ["Title\n=====\nA text of two lines.\n.. note:: x"]
    assert len(documents(tmp_path)) == 2  # a folder that contains nothing else


def test_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,body\n1,"one, two"\n2,"three\nlines"\n')
    assert list(read_documents(tmp_path / "a.csv", column="body")) == ["one, two", "three\nlines"]
    with pytest.raises(DataError, match=r"a\.csv: expected a column 'text', got columns 'id', 'body'"):
        documents(tmp_path / "a.csv")
    (tmp_path / "a.tsv").write_text('text\tlabel\nsaid "so\t1\n')
    assert documents(tmp_path / "a.tsv") == ['said "so']
    (tmp_path / "a.jsonl").write_text('{"meta": {"body": "deep"}}\n')
    assert list(read_documents(tmp_path / "a.jsonl", column="meta.body")) == ["deep"]


def test_saved_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["one", "two"]})})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert documents(tmp_path / "saved") == ["one", "two"]
    assert documents(tmp_path / "saved" / "train") == ["one", "two"]


def test_iterables_of_texts() -> None:
    assert documents(iter(["one", ""])) == ["one", ""]
    assert documents(text for text in ("a",)) == ["a"]
    with pytest.raises(TypeError, match=r"source\[1\]: expected a text, got int"):
        documents(iter(["one", 2]))
    with pytest.raises(TypeError, match="expected a path or an iterable of texts, got int"):
        documents(3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nb\xff d\n", r"a\.txt, line 2: expected UTF-8 text, got byte 0xff as number 2 of the line"),
        ("a.txt.gz", gzip.compress(b"word " * 1000, mtime=0)[:-20], r"a\.txt\.gz: expected a whole gzip file"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz: expected a whole gzip file"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: expected a JSON object, got"),
        ("a.jsonl", b'{"body": "a"}\n', r"line 1: expected a text in 'text', got 'body'"),
        ("a.jsonl", b"[1]\n", r"line 1: expected a JSON object, got \[1\]"),
        ("a.jsonl", b'{"text": 1}\n', r"line 1: expected a text in 'text', got 1"),
        ("a.pdf", b"%PDF", r"a\.pdf: expected a name that ends in \.txt, \.txt\.gz, \.jsonl"),
    ],
)
def test_foreign_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        documents(tmp_path / name)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"none\.txt: expected a file, a folder or a pattern that matches one, got nothing"
    ):
        documents(tmp_path / "none.txt")
    with pytest.raises(DataError, match=r"expected files that end in \.txt, .*, got none"):
        documents(tmp_path)
    with pytest.raises(DataError, match=r"expected a path, got File name too long|to pass texts, use an iter"):
        documents(["a text that is no path, " * 50])


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r")), max_size=5))
def test_json_lines_keep_any_text(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert documents(path) == texts
