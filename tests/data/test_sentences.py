"""Sentences of several languages, and the Korean sample."""

from __future__ import annotations

import itertools
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from fasttfm import data
from fasttfm.data.sentences import sentence_starts


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? four", ["One.", "Two!", "Three? four"]),
        ("He said “So.” She left. (Why?) Who knows", ["He said “So.”", "She left.", "(Why?)", "Who knows"]),
        ("Mr. Speaker, George W. Bush and Dr. No came. Then 3 left.", None),
        ("a line\n\n  another", ["a line", "another"]),
        ("no end", ["no end"]),
        ("It cost $3.50 in the U.S. of old", ["It cost $3.50 in the U.S. of old"]),
        ("End. \nnext line", ["End.", "next line"]),
        (
            "École fermée. École ouverte! “Étrange”… À demain",
            ["École fermée.", "École ouverte!", "“Étrange”…", "À demain"],
        ),
        ("오늘은 비가 왔다. 내일은 맑겠다! 정말? 그렇다.", ["오늘은 비가 왔다.", "내일은 맑겠다!", "정말?", "그렇다."]),
        (
            "今日は雨だ。明日は晴れる！「本当？」と聞いた。はい。",
            ["今日は雨だ。", "明日は晴れる！", "「本当？」と聞いた。", "はい。"],
        ),
        (
            "他来了。她说：“好！”然后走了。真的吗？！对。",
            ["他来了。", "她说：“好！”", "然后走了。", "真的吗？！", "对。"],
        ),
        ("Er kam am 3. Oktober, z. B. um 9 Uhr. Über Dr. Ahab sprach er. Ende", None),
        ("वह आया। वह गया। अंत", ["वह आया।", "वह गया।", "अंत"]),
        ("هل جاء؟ نعم جاء. انتهى", ["هل جاء؟", "نعم جاء.", "انتهى"]),
    ],
)
def test_sentences(text: str, sentences: list[str] | None) -> None:
    bounds = [0, *sentence_starts(text), len(text)]
    sentences_of_text = [text[a:b].strip() for a, b in itertools.pairwise(bounds)]
    with_abbreviations = {
        "Mr": ["Mr. Speaker, George W. Bush and Dr. No came.", "Then 3 left."],
        "Er": ["Er kam am 3. Oktober, z. B. um 9 Uhr.", "Über Dr. Ahab sprach er.", "Ende"],
    }
    assert sentences_of_text == (sentences or with_abbreviations[text[:2]])


def test_long_texts_take_no_longer_than_their_length() -> None:
    """No rule has a long lookbehind or lookahead; such a rule would take minutes of CPU time here."""
    length = 100_000
    begun = time.process_time()
    for text in ("a " * length, '." ' * length, "\n" * length, "\n " * length, "。」" * length, "." + '"' * length):
        sentence_starts(text)
    assert time.process_time() - begun < 20.0


@pytest.mark.parametrize(("kind", "family"), [("nsp", "wordpiece"), ("sop", "unigram")])
def test_the_korean_sample_gives_pairs_of_sentences(kind: str, family: str, tmp_path: Path) -> None:
    path = data.shipped_corpus("korean")
    documents = list(data.read_documents(path / "public-domain.txt"))
    assert len(documents) == 7
    assert all(unicodedata.is_normalized("NFC", document) for document in documents)
    readme = (path.parent / "README.md").read_text()
    assert all(word in readme for word in ("public domain", "기미독립선언서", "make_korean.py", "under its licence"))
    joined = iter(document.replace("\n", " ") for document in documents[:3])  # sentences are found by punctuation only
    tokenizer = data.train_tokenizer(family, documents, 400)  # type: ignore[arg-type]
    shards = data.prepare(joined, tokenizer, tmp_path, progress=False)
    assert [len(shards.sentences(number)) - 1 for number in range(3)] == [3, 3, 3]
    stream = data.BatchStream(shards, data.SequenceFormat(kind, 64), tokens_per_batch=128, seed=0, epochs=4)  # type: ignore[arg-type]
    labels = np.concatenate([batch.sentence_labels for batch in stream])
    assert set(labels.tolist()) == {0, 1}
    assert tokenizer.decode(tokenizer.encode("엄마야 누나야 강변 살자")) == "엄마야 누나야 강변 살자"


def test_unknown_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="language: expected one of english, korean, got 'latin'"):
        data.shipped_corpus("latin")
