"""Shards: their contents; they are written once, continue after an interruption, and detect damage."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_corpus import Traced, word_tokenizer

from fasttfm.data import DataError, SpecialIds, Tokenizer, TokenShards, prepare, train_tokenizer

pytest.importorskip("tokenizers", reason="fasttfm's tokenizers need the library tokenizers")
TEXTS = [f"w{i} w{i + 1}\nw{i + 2} w{i + 3} w{i + 4}" for i in range(40)]
ODD = ["", " \n\n ", "w1", "w2 " * 5000, "🐋 w3\r\nw4\r\n\r\nw5", "nul\x00l w6", "x" * 100_000, "w7. W8! w9", "\ufeff"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return word_tokenizer(100)


def make(folder: Path, tokenizer: Tokenizer, texts: Any = None, **options: Any) -> TokenShards:
    options = {"progress": False, "shard_characters": 60, "workers": 2, **options}
    return prepare(iter(TEXTS) if texts is None else texts, tokenizer, folder, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def ids(shards: TokenShards) -> list[list[int]]:
    return [shards.document(i).tolist() for i in range(shards.documents)]


# ---- contents --------------------------------------------------------------------------------------------------------


def test_documents_and_sentences(traced: Traced) -> None:
    shards = traced.shards
    assert len(shards.files) > 3
    assert shards.documents == traced.document.max() + 1
    assert shards.tokens == traced.words
    assert shards.vocab_size == len(traced.document)
    for number in range(shards.documents):
        rows = np.flatnonzero(traced.document == number)
        assert np.array_equal(shards.document(number), rows)
        starts = np.append(np.flatnonzero(traced.starts[rows]), len(rows))
        assert np.array_equal(shards.sentences(number), starts)


def test_documents_are_views_of_the_files(traced: Traced) -> None:
    first = traced.shards.document(0)
    assert first.dtype == np.uint16
    assert not first.flags.owndata
    assert not first.flags.writeable
    assert np.shares_memory(first, traced.shards.files[0]["tokens"])
    base = traced.shards.files[0]["tokens"]
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    shards = make(tmp_path, word_tokenizer(70_000), iter(["w69999 w1"]))
    assert shards.document(0).dtype == np.uint32
    assert ids(shards) == [[70_005, 7]]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_odd_texts(tmp_path: Path, kind: Any) -> None:
    tokenizer = train_tokenizer(kind, [text for text in ODD if text], 400)
    check_texts(make(tmp_path, tokenizer, iter(ODD)), tokenizer, ODD)


def check_texts(shards: TokenShards, tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = [tokenizer.encode(text) for text in texts]
    assert ids(shards) == [tokens for tokens in encoded if tokens]
    for number in range(shards.documents):
        bounds = shards.sentences(number)
        assert bounds[0] == 0
        assert bounds[-1] == len(shards.document(number))
        assert np.all(np.diff(bounds) > 0)


_TOKENIZERS: dict[str, Tokenizer] = {}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=60), max_size=6), st.sampled_from(["wordpiece", "bpe"]))
def test_any_texts(tmp_path_factory: pytest.TempPathFactory, texts: list[str], kind: Any) -> None:
    if kind not in _TOKENIZERS:
        _TOKENIZERS[kind] = train_tokenizer(kind, ["a b. C d\ne f"], 300)
    tokenizer = _TOKENIZERS[kind]
    texts = [*texts, "a b"]
    check_texts(make(tmp_path_factory.mktemp("any"), tokenizer, iter(texts)), tokenizer, texts)


def test_sentences_begin_after_ends_and_on_lines(tmp_path: Path) -> None:
    for kind in ("wordpiece", "bpe"):
        text = "The whale swims. The boat follows!\nNo end here\n\nMr. Starbuck sings."
        tokenizer = train_tokenizer(kind, [text], 300)  # type: ignore[arg-type]
        shards = make(tmp_path / kind, tokenizer, iter([text]))
        bounds = shards.sentences(0).tolist()
        parts = [tokenizer.decode(shards.document(0)[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
        if kind == "bpe":
            assert parts == ["The whale swims.", " The boat follows!\n", "No end here\n\n", "Mr. Starbuck sings."]
        else:
            assert [part.split()[0] for part in parts] == ["the", "the", "no", "mr."]


def test_split(traced: Traced) -> None:
    train, held = traced.shards.split(0.1)
    assert held.documents == 4
    assert sorted(ids(train) + ids(held)) == sorted(ids(traced.shards))
    assert traced.shards.split(0.1)[1].fingerprint == held.fingerprint
    assert len({train.fingerprint, held.fingerprint, traced.shards.fingerprint}) == 3
    assert train.split(0.001)[1].documents == 1
    with pytest.raises(ValueError, match="held_out: expected a fraction between 0 and 1, got 1"):
        train.split(1)
    with pytest.raises(DataError, match="expected two documents or more to hold some out, got 1"):
        train.split(0.001)[1].split()


# ---- preparing: once, in parallel, after an interruption -------------------------------------------------------------


def test_workers_change_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for workers in (1, 4):
        make(tmp_path / str(workers), tokenizer, workers=workers)
    assert files(tmp_path / "1") == files(tmp_path / "4")
    assert len(files(tmp_path / "1")) > 20


def test_a_second_call_does_nothing(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "texts.txt"
    source.write_text("\n\n".join(TEXTS))
    first = make(tmp_path / "shards", tokenizer, source)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("0*")}
    monkeypatch.setattr("fasttfm.data.shards._Writer.write", lambda *_: pytest.fail("worked again"))
    assert make(tmp_path / "shards", tokenizer, source).fingerprint == first.fingerprint
    monkeypatch.undo()
    monkeypatch.setattr("fasttfm.data.shards.token_arrays", lambda *_: pytest.fail("tokenized again"))
    assert make(tmp_path / "shards", tokenizer).fingerprint == first.fingerprint  # an iterable has to be read
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("0*")} == times


def test_other_texts_and_tokenizers_replace(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = make(tmp_path, tokenizer)
    assert make(tmp_path, word_tokenizer(90)).fingerprint != first.fingerprint
    turned = make(tmp_path, tokenizer, iter(TEXTS[::-1]))
    assert ids(turned) == [tokenizer.encode(text) for text in TEXTS[::-1]]
    fewer = make(tmp_path, tokenizer, iter(TEXTS[:5]))
    assert fewer.documents == 5
    expected = [f"{i:05d}.{part}" for i in range(len(fewer.files)) for part in ("documents.npy", "json")]
    assert set(expected) <= files(tmp_path).keys()
    assert len(list(tmp_path.glob("*.npy"))) == 3 * len(fewer.files) + 1


def interrupted(
    count: int, texts: list[str] = TEXTS, is_ready: Callable[[], bool] = lambda: True, seconds: float = 60.0
) -> Iterator[str]:
    """The first texts, and then an interruption as soon as the threads that write shards are ready for it."""
    yield from texts[:count]
    end = time.monotonic() + seconds
    while not is_ready() and time.monotonic() < end:
        time.sleep(0.01)
    raise KeyboardInterrupt


def test_half_replaced_shards_do_not_open(tmp_path: Path, tokenizer: Tokenizer) -> None:
    make(tmp_path, tokenizer)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, tokenizer, interrupted(20, TEXTS[::-1]))
    with pytest.raises(DataError, match="got a folder without"):
        TokenShards.open(tmp_path)


@pytest.mark.parametrize("count", [0, 1, 20, 39])
def test_preparing_continues_after_an_interruption(tmp_path: Path, tokenizer: Tokenizer, count: int) -> None:
    def is_ready() -> bool:
        return count < 20 or len(list((tmp_path / "part").glob("*.npy"))) > 6

    make(tmp_path / "whole", tokenizer)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "part", tokenizer, interrupted(count, is_ready=is_ready))
    with pytest.raises(DataError, match=r"expected prepared shards \(shards\.json\), got a folder without"):
        TokenShards.open(tmp_path / "part")
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "part").glob("*.npy")}
    assert (len(done) > 6) == (count >= 20)
    make(tmp_path / "part", tokenizer)
    assert files(tmp_path / "part") == files(tmp_path / "whole")
    now = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "part").glob("0*.npy")}
    assert {name: now[name] for name in done} == done


def test_shards_of_a_killed_process_are_rewritten(tmp_path: Path, tokenizer: Tokenizer) -> None:
    make(tmp_path, tokenizer)
    whole = files(tmp_path)
    (tmp_path / "shards.json").unlink()
    (tmp_path / "00001.json").unlink()  # its record is written last
    (tmp_path / "00002.tokens.npy").write_bytes(whole["00002.tokens.npy"][:-1])
    (tmp_path / "00003.sentences.npy").unlink()
    (tmp_path / "00004.tokens.npy.partial").write_bytes(b"half")
    make(tmp_path, tokenizer)
    assert {name: content for name, content in files(tmp_path).items() if "partial" not in name} == whole


def test_damage_is_repaired_by_preparing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = tmp_path / "texts.txt"
    source.write_text("\n\n".join(TEXTS))
    shards = tmp_path / "shards"
    make(shards, tokenizer, source)
    whole = files(shards)
    damage(shards / "00002.tokens.npy")
    make(shards, tokenizer, source)
    assert files(shards) == whole


def test_several_at_the_same_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prepared: list[TokenShards] = []
    threads = [threading.Thread(target=lambda: prepared.append(make(tmp_path, tokenizer))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({shards.fingerprint for shards in prepared}) == 1
    assert len(prepared) == 4


# ---- errors ----------------------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_checksums(tmp_path: Path, tokenizer: Tokenizer) -> None:
    make(tmp_path, tokenizer)
    damage(tmp_path / "00002.tokens.npy")
    with pytest.raises(DataError, match=r"00002\.tokens\.npy: expected checksum \w{8}, got \w{8}: the file is damaged"):
        TokenShards.open(tmp_path)
    TokenShards.open(tmp_path, verify=False)
    (tmp_path / "00001.documents.npy").write_bytes(b"short")
    with pytest.raises(DataError, match=r"00001\.documents\.npy: expected \d+ bytes, got 5 bytes"):
        TokenShards.open(tmp_path, verify=False)
    (tmp_path / "00001.documents.npy").unlink()
    with pytest.raises(DataError, match=r"00001\.documents\.npy: expected \d+ bytes, got no file"):
        TokenShards.open(tmp_path, verify=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", r"shards\.json: expected the file that fasttfm wrote, got no JSON"),
        ("[]", "got another JSON file"),
        (json.dumps({"format": 99, "shards": []}), "expected format 2, got format 99"),
    ],
)
def test_foreign_folders(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "shards.json").write_text(content)
    with pytest.raises(DataError, match=message):
        TokenShards.open(tmp_path)


@pytest.mark.parametrize(
    "name", ["00000.tokens.npy", "00000.sentences.npy", "00000.documents.npy", "starts_word.npy", "shards.json"]
)
def test_a_flipped_byte_anywhere_is_named_and_repaired(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(TEXTS))
    whole = prepare(texts, tokenizer, tmp_path / "shards", progress=False)
    expected = [whole.document(number).tolist() for number in range(whole.documents)]
    path = tmp_path / "shards" / name
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 40)):
        damaged = bytearray(content)
        damaged[position] ^= 1  # changes a digit
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=name):
            TokenShards.open(tmp_path / "shards")
    again = prepare(texts, tokenizer, tmp_path / "shards", progress=False)
    assert [again.document(number).tolist() for number in range(again.documents)] == expected
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", ["{", "[]", '{"digest": 1}', '{"digest": null, "files": 3}', "\xff"])
def test_a_shard_with_a_damaged_record_is_rewritten(content: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = prepare(iter(TEXTS), tokenizer, tmp_path, progress=False)
    (tmp_path / "00000.json").write_text(content, encoding="latin-1")
    assert prepare(iter(TEXTS), tokenizer, tmp_path, progress=False).fingerprint == whole.fingerprint


def test_other_files_are_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "20240101.txt").write_text("a diary")
    (tmp_path / "7.json").write_text("{}")
    prepare(iter(TEXTS), tokenizer, tmp_path, progress=False, shard_characters=10)
    prepare(iter(TEXTS[:1]), tokenizer, tmp_path, progress=False)
    assert (tmp_path / "20240101.txt").read_text() == "a diary"
    assert (tmp_path / "7.json").exists()
    assert len(list(tmp_path.glob("*.tokens.npy"))) == 1


def test_missing_shards(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected prepared shards \(shards\.json\), got nothing"):
        TokenShards.open(tmp_path / "none")


@pytest.mark.parametrize("texts", [[], ["", " \n "]])
def test_texts_without_tokens(tmp_path: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    with pytest.raises(DataError, match="expected text, got no document with a token"):
        make(tmp_path, tokenizer, iter(texts))
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(DataError, match=r"empty\.txt: expected text"):
        make(tmp_path / "shards", tokenizer, empty)


def test_a_tokenizer_without_the_special_tokens_of_an_objective(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from fasttfm.data import BatchStream, SequenceFormat

    bare = Tokenizer(tokenizer.backend, SpecialIds(unk=1))
    shards = make(tmp_path, bare)
    with pytest.raises(ValueError, match="expected a tokenizer with a cls token for nsp, got one without"):
        BatchStream(shards, SequenceFormat("nsp", 16), tokens_per_batch=64, seed=0)
    (batch,) = BatchStream(shards, SequenceFormat("causal", 16), tokens_per_batch=4096, seed=0, epochs=1)
    assert batch.tokens == shards.tokens
