"""Tokenizers: training, saving for Hugging Face's tools, loading from each format, and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttfm.data import DataError, Tokenizer, load_tokenizer, train_tokenizer

pytest.importorskip("tokenizers", reason="fasttfm's tokenizers need the library tokenizers")
TEXTS = ["the whale swims, the whaler swims after it", "Ahab's whales: white, whiter, whitest", "über 🐋"] * 3


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    return train_tokenizer("wordpiece", TEXTS, 80)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer("bpe", TEXTS, 300)


def test_wordpiece(wordpiece: Tokenizer) -> None:
    special = wordpiece.special
    assert (special.pad, special.unk, special.cls, special.sep, special.mask) == (0, 1, 2, 3, 4)
    assert special.all() == [0, 1, 2, 3, 4]
    assert wordpiece.vocab_size <= 80
    ids = wordpiece.encode("The WHALE swims")
    assert wordpiece.decode(ids) == "the whale swims"
    assert wordpiece.encode_batch(["The WHALE swims", ""]) == [ids, []]
    assert special.cls not in ids
    starts = wordpiece.starts_word
    assert starts.dtype == bool
    assert len(starts) == wordpiece.vocab_size
    names = [wordpiece.token(id) for id in range(wordpiece.vocab_size)]
    assert [name for name, start in zip(names, starts, strict=True) if not start] == [
        name for name in names if name.startswith("##")
    ]


def ids_of(texts: list[str], size: int) -> list[str]:
    tokenizer = train_tokenizer("wordpiece", texts, size)
    return [tokenizer.token(id) for id in range(tokenizer.vocab_size)]


def test_the_same_texts_give_the_same_wordpiece_vocabulary() -> None:
    """The library's hash tables have a random order, and every pair of these letters is equally frequent."""
    texts = [f"{a}{b}{c}" for a in "abcdefg" for b in "hijklmn" for c in "opqrstu"]
    ids = ids_of(texts, 60)
    assert all(ids_of(texts, 60) == ids for _ in range(4))
    inside = [f"##{letter}" for letter in "hijklmnopqrstu"]
    assert ids[:26] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstu"]
    assert ids[26:40] == inside
    assert len(set(ids)) == len(ids) == 60


@pytest.mark.slow
def test_every_process_trains_the_same_wordpiece_vocabulary(tmp_path: Path) -> None:
    code = f"from fasttfm.data import train_tokenizer; train_tokenizer('wordpiece', {TEXTS!r}, 60).save('%s')"
    names = ("0", "1")
    started = [
        subprocess.Popen([sys.executable, "-c", code % (tmp_path / name)], env={**os.environ, "PYTHONHASHSEED": name})
        for name in names
    ]
    assert [process.wait() for process in started] == [0, 0]
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in names)
    assert first == second


def test_texts_of_an_iterator_are_read_once() -> None:
    texts = ["a\rb c\u2028d", "f\x0bg e", "\n\n"]
    tokenizer = train_tokenizer("wordpiece", iter(texts), 40)
    assert tokenizer.fingerprint == train_tokenizer("wordpiece", texts, 40).fingerprint
    assert tokenizer.encode("fg")


def test_bpe(bpe: Tokenizer) -> None:
    special = bpe.special
    assert (special.cls, special.pad, special.sep, special.unk, special.mask) == (0, 1, 2, 3, 4)
    assert (special.bos, special.eos) == (0, 2)
    starts = bpe.starts_word
    assert starts[bpe.encode(" the")[0]]
    assert starts[bpe.encode("\n")[0]]
    assert starts[bpe.encode(",")[0]]
    assert not starts[bpe.encode("e")[0]]
    assert starts[special.all()].all()


@pytest.mark.slow
@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_bpe_keeps_any_text(text: str) -> None:
    tokenizer = train_once()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


_BPE: list[Tokenizer] = []


def train_once() -> Tokenizer:
    if not _BPE:
        _BPE.append(train_tokenizer("bpe", TEXTS, 300))
    return _BPE[0]


def test_offsets(wordpiece: Tokenizer, bpe: Tokenizer) -> None:
    text = "Whales swim, über"
    for tokenizer in (wordpiece, bpe):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text)
        assert len(offsets) == len(ids)
        assert text[offsets[0][0] : offsets[-1][1]] == text


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_saved_and_loaded(kind: str, wordpiece: Tokenizer, bpe: Tokenizer, tmp_path: Path) -> None:
    tokenizer = {"wordpiece": wordpiece, "bpe": bpe}[kind]
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.special == tokenizer.special
        assert loaded.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
        assert np.array_equal(loaded.starts_word, tokenizer.starts_word)
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    special = tokenizer.special
    a, b = (tokenizer.encode(text) for text in TEXTS[:2])
    between = [special.sep] * (2 if kind == "bpe" else 1)
    assert other(TEXTS[0])["input_ids"] == [special.cls, *a, special.sep]
    assert other(TEXTS[0], TEXTS[1])["input_ids"] == [special.cls, *a, *between, *b, special.sep]
    assert (other.pad_token_id, other.mask_token_id, other.unk_token_id) == (special.pad, special.mask, special.unk)
    assert len(other) == tokenizer.vocab_size


def test_vocabulary_files(wordpiece: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    names = [wordpiece.token(id) for id in range(wordpiece.vocab_size)]
    path.write_text("".join(f"{name}\n" for name in names))
    for source in (path, tmp_path):
        loaded = load_tokenizer(source)
        assert loaded.special == wordpiece.special
        assert loaded.encode("The WHALE swims") == wordpiece.encode("The WHALE swims")
    path.write_text("".join(f"{name}\n" for name in [*names, "Whale"]))
    assert load_tokenizer(path).encode("Whale") == [len(names)]  # the vocabulary has capitals: no lowercasing
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert load_tokenizer(tmp_path).encode("Whale") == wordpiece.encode("whale")


def test_settings_name_special_tokens(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["pad_token"] = {"content": "</s>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).special.pad == bpe.special.eos


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json: expected a tokenizer\.json of the tokenizers library"),
        ("tokenizer.json", "no json", r"tokenizer\.json: expected a tokenizer\.json of the tokenizers library"),
        ("vocab.txt", "a\n[UNK]\na\n", r"vocab\.txt, line 3: expected every token once, got 'a' as in line 1"),
        ("vocab.txt", "a\nb\n", r"vocab\.txt: expected a WordPiece vocabulary with \[UNK\]"),
        ("vocab.txt", "", r"vocab\.txt: expected a WordPiece vocabulary with \[UNK\]"),
    ],
)
def test_invalid_tokenizer_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / name)


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a tokenizer\.json, a vocab\.txt, .*, got none of them"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="got nothing there"):
        load_tokenizer(tmp_path / "none")


def test_nothing_to_train_on() -> None:
    for kind in ("wordpiece", "bpe"):
        with pytest.raises(DataError, match="expected texts, got none or only empty ones"):
            train_tokenizer(kind, ["", "\n"], 400)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind: expected one of wordpiece, bpe, unigram, got 'words'"):
        train_tokenizer("words", TEXTS, 400)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocab_size: expected at least 261 for bpe, got 100"):
        train_tokenizer("bpe", TEXTS, 100)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"needs tokenizers: pip install 'fasttfm\[train\]'"):
        train_tokenizer("bpe", TEXTS, 300)
