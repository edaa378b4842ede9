"""Vectors of the chunks of long texts, and search for texts by their chunks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttfm.cli.main import main
from fasttfm.data import Tokenizer, load_tokenizer
from fasttfm.inference import EmbedSettings, Session
from fasttfm.inference.chunks import chunk_vectors
from fasttfm.tasks.search import search_texts
from fasttfm.tasks.vector_files import Row, VectorFile, write_vectors

LONG = " ".join(["Peace and commerce with all nations.", "The army and the navy of the United States."] * 12)
TEXTS = ["War.", "", LONG, "the debts of the nation " * 3]
SIZE = 8


@pytest.fixture(scope="module")
def bert(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_models import save_bert

    return save_bert(wordpiece, tmp_path_factory.mktemp("bert"), hidden_size=32, initializer_range=0.3)


@pytest.mark.parametrize("prompt", ["", "text: "])
def test_chunks_are_texts_of_their_own(prompt: str, bert: Path) -> None:
    tokenizer = load_tokenizer(bert)
    before, after = tokenizer.around()
    with Session(bert, settings=EmbedSettings(normalize=True, prompt=prompt), device="cpu") as session:
        found = list(chunk_vectors(session, TEXTS, SIZE))
        for text, vectors in zip(TEXTS, found, strict=True):
            ids = tokenizer.encode(text)
            pieces = [ids[start : start + SIZE] for start in range(0, len(ids) or 1, SIZE)]
            expected = session.encode([[*before, *tokenizer.encode(prompt), *piece, *after] for piece in pieces])
            np.testing.assert_allclose(vectors, expected, atol=1e-5)
        assert session.counts.truncated == 0


@pytest.mark.parametrize("max_length", [128, 40])
def test_late_chunks_are_means_of_the_states_of_the_whole_text(max_length: int, bert: Path) -> None:
    tokenizer = load_tokenizer(bert)
    before, after = tokenizer.around()
    settings = EmbedSettings(normalize=True, max_length=max_length, dimensions=16)
    with Session(bert, settings=settings, device="cpu") as session:
        found = list(chunk_vectors(session, TEXTS, SIZE, late=True))
        for text, vectors in zip(TEXTS, found, strict=True):
            ids = tokenizer.encode(text)
            window = (max_length - 2) // SIZE * SIZE
            means = []
            for start in range(0, len(ids) or 1, window):
                piece = ids[start : start + window]
                states = session.encode([*before, *piece, *after], output="states")
                inner = states[1:-1] if piece else states
                means += [inner[first : first + SIZE].mean(0)[:16] for first in range(0, len(inner), SIZE)]
            expected = np.stack(means) / np.linalg.norm(means, axis=1, keepdims=True)
            np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "settings", "sentence"),
    [
        (0, {}, "size: expected a whole number from 1 to 126 tokens, got 0"),
        (127, {}, "size: expected a whole number from 1 to 126 tokens, got 127"),
        (8, {"pooling": "first"}, "late: expected pooling='mean' of the last layer, got 'first' of layers 'last'"),
    ],
)
def test_what_is_refused(size: int, settings: dict[str, Any], sentence: str, bert: Path) -> None:
    session = Session(bert, settings=EmbedSettings(**settings), device="cpu")
    with pytest.raises(ValueError, match=sentence):
        next(chunk_vectors(session, TEXTS, size, late=True))


def test_a_text_is_as_near_as_its_nearest_chunk(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    counts, query = [7, 1, 3, 9, 2, 5], random.normal(size=(2, 8)).astype(np.float32)
    parts = [random.normal(size=(count, 8)).astype(np.float32) for count in counts]
    parts[3] += 5 * query[0]  # all nine chunks are the nearest
    path = tmp_path / "a.npz"
    write_vectors(path, (Row(str(n), part) for n, part in enumerate(parts)), parts="chunks")
    found = search_texts(VectorFile(path), query, 4)
    for row, one in zip(found, query, strict=True):
        scores = [((part @ one) / np.linalg.norm(part, axis=1)).max() / np.linalg.norm(one) for part in parts]
        assert [match.row for match in row] == np.argsort(-np.array(scores))[:4].tolist()
        assert [match.score for match in row] == pytest.approx(sorted(scores, reverse=True)[:4], abs=1e-6)
    assert len(search_texts(VectorFile(path), query, 100)[0]) == 6


def test_the_commands_take_chunks(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: Any) -> int:
        return main([str(argument) for argument in arguments])

    texts, output = tmp_path / "texts.txt", tmp_path / "found.jsonl"
    texts.write_text("\n".join(text.strip() for text in TEXTS) + "\n")
    model = ("--model", bert, "--device", "cpu", "--quiet")
    for option in ("--chunks", "--late-chunks"):
        path = tmp_path / f"{option[2:]}.safetensors"
        assert run("embed", *model, "--data", texts, option, SIZE, "--dtype", "int8", "--output", path) == 0
        assert "4 texts' chunks, vectors of 32 numbers" in capsys.readouterr().out
        search = ("search", *model, "--vectors", path, "--texts", texts, "--top", 2, "--overwrite")
        assert run(*search, "--query", "the debts of the nation", "--output", output) == 0
        (row,) = (json.loads(line) for line in output.read_text().splitlines())
        assert [match["index"] for match in row["matches"]][:1] == [3]
        assert row["matches"][0]["text"] == TEXTS[3].strip()
    for options, sentence in (
        (("--chunks", 8, "--output", tmp_path / "a.npy"), "--chunks: expected --output with a name that ends in .npz"),
        (("--late-chunks", 8, "--tokens", "--output", tmp_path / "a.npz"), "--late-chunks: .*, got --tokens"),
        (("--late-chunks", 0, "--output", tmp_path / "a.npz"), "size: expected a whole number from 1 to 126 tokens"),
    ):
        with pytest.raises(SystemExit):
            run("embed", *model, "--data", texts, *options)
        assert re.search(sentence, capsys.readouterr().err)
