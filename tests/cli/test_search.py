"""``fasttfm search`` over the files of ``fasttfm embed``, and ``fasttfm show attention``."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fasttfm.cli.main import main
from fasttfm.data import load_tokenizer
from fasttfm.inference.opening import open_model
from fasttfm.models.family import Head
from fasttfm.tasks import search as search_module
from fasttfm.tasks import vector_index
from fasttfm.tasks.search import search
from fasttfm.tasks.vector_files import Row, VectorFile, write_vectors

TEXTS = ["Peace and commerce with all nations.", "War.", "", "The army and the navy of the United States."]


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit):
        run(*arguments)
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(bert_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with their vectors."""
    folder = tmp_path_factory.mktemp("vectors")
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    call = ("embed", "--model", bert_directory, "--data", folder / "texts.txt", "--device", "cpu", "--pooling", "max")
    for name in ("vectors.npy", "vectors.jsonl", "vectors.safetensors"):
        assert run(*call, "--output", folder / name) == 0
    return folder


def test_queries_have_the_dimensions_of_the_vectors(
    bert_directory: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.safetensors"
    model = ("--model", bert_directory, "--device", "cpu", "--quiet")
    assert run("embed", *model, "--data", folder / "texts.txt", "--dimensions", 8, "--output", path) == 0
    whole = tmp_path / "whole.npy"
    assert run("embed", *model, "--data", folder / "texts.txt", "--output", whole) == 0
    assert np.array_equal(next(VectorFile(path).blocks(9))[0], np.load(whole)[:, :8])
    capsys.readouterr()
    assert run("search", *model, "--vectors", path, "--query", TEXTS[3], "--top", 1) == 0
    assert re.search(r"1\.000 +4$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "jsonl", "csv", "parquet"])
def test_matches_are_those_of_the_full_product(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="it reads parquet")
    random = np.random.default_rng(0)
    vectors, queries = random.normal(size=(50, 8)).astype(np.float32), random.normal(size=(3, 8)).astype(np.float32)
    vectors[7] = vectors[33] = queries[1]
    vectors[20] = 0
    path = tmp_path / f"vectors.{suffix}"
    write_vectors(path, (Row(f"text {n}", vector) for n, vector in enumerate(vectors)))
    monkeypatch.setattr(search_module, "_BLOCK_BYTES", 4 * 8 * 6)  # blocks of six vectors
    matches = search(VectorFile(path), queries, 5)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = queries @ (vectors / np.where(norms, norms, 1)).T / np.linalg.norm(queries, axis=1, keepdims=True)
    for row, expected in zip(matches, scores, strict=True):
        order = np.lexsort((np.arange(50), -expected))[:5]
        assert [match.score for match in row] == pytest.approx(expected[order], abs=1e-6)
        assert [match.row for match in row] == list(order)
        has_texts = suffix in ("jsonl", "csv", "parquet")
        assert {match.text for match in row} == ({f"text {n}" for n in order} if has_texts else {None})
    assert [match.row for match in matches[1][:2]] == [7, 33]


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
def test_matches_of_bytes_are_those_of_the_restored_vectors(
    dtype: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(200, 24)).astype(np.float32) * random.uniform(0.1, 3, size=(200, 1))
    queries = vectors[[3, 77]] + random.normal(size=(2, 24)).astype(np.float32) / 20
    path = tmp_path / f"vectors.{suffix}"
    rows = [Row(f"text {n}", vector) for n, vector in enumerate(vectors)]
    if suffix == "npy" and dtype in ("int8", "uint8"):
        with pytest.raises(ValueError, match=r"int8: expected a file that ends in .*, which store"):
            write_vectors(path, rows, dtype=dtype)
        return
    assert write_vectors(path, rows, dtype=dtype) == (200, 24 if dtype.endswith("int8") else 3)
    file = VectorFile(path)
    assert file.precision == dtype
    (restored,) = (block for block, _ in file.blocks(1000))
    monkeypatch.setattr(search_module, "_BLOCK_BYTES", 4 * 24 * 60)
    matches = search(file, queries, 3)
    scores = (queries @ restored.T) / np.linalg.norm(restored, axis=1) / np.linalg.norm(queries, axis=1, keepdims=True)
    for row, expected in zip(matches, scores, strict=True):
        order = np.lexsort((np.arange(200), -expected))[:3]
        assert [match.row for match in row] == list(order)
        assert [match.score for match in row] == pytest.approx(expected[order], abs=1e-6)
    assert [row[0].row for row in matches] == [3, 77]


def test_words_and_bytes_have_the_same_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (30, 16), np.uint8)
    expected = np.unpackbits(bits ^ bits[4], axis=1).sum(1)
    assert np.array_equal(search_module._hamming(bits, bits[4:6])[0], expected)
    short = search_module._hamming(np.ascontiguousarray(bits[:, :3]), bits[4:5, :3].copy())[0]
    assert np.array_equal(short, np.unpackbits((bits ^ bits[4])[:, :3], axis=1).sum(1))
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert np.array_equal(search_module._hamming(bits, bits[4:6])[0], expected)


def test_the_commands_take_bytes(
    bert_directory: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ("--model", bert_directory, "--device", "cpu", "--quiet")
    data = ("embed", *call, "--data", folder / "texts.txt")
    for dtype in ("int8", "ubinary"):
        output = tmp_path / f"{dtype}.safetensors"
        assert run(*data, "--dtype", dtype, "--output", output) == 0
        capsys.readouterr()
        assert run("search", *call, "--vectors", output, "--query", TEXTS[3], "--top", 1) == 0
        assert re.search(r" [01]\.\d+ +4$", capsys.readouterr().out, re.MULTILINE)
    again, exact = tmp_path / "again.npz", tmp_path / "exact.npy"
    ranges = VectorFile(tmp_path / "int8.safetensors").ranges
    assert run(*data, "--output", exact) == 0
    for calibration in (tmp_path / "int8.safetensors", exact):
        options = ("--dtype", "uint8", "--calibration", calibration, "--overwrite")
        assert run(*data, *options, "--output", again) == 0
        assert np.array_equal(VectorFile(again).ranges, ranges)  # type: ignore[arg-type]
    for options, sentence in (
        (("--dtype", "int8", "--output", tmp_path / "a.jsonl"), "dtype: int8: expected a file that ends in .npz"),
        (
            ("--calibration", exact, "--output", tmp_path / "a.npy"),
            "--calibration: expected with --dtype int8 or uint8",
        ),
    ):
        assert sentence in refused(capsys, *data, *options)
    pooled = ("--query", "a", "--pooling", "mean,max")
    signs = tmp_path / "ubinary.safetensors"
    for path, message in ((again, "width 128, got 64;"), (signs, "width 128, 16 bytes of signs, got 8;")):
        assert message in refused(capsys, "search", *call, "--vectors", path, *pooled)


class NearestByProducts:
    """What this package reads of ``usearch.index.Index``."""

    files: ClassVar[dict[str, NearestByProducts]] = {}

    def __init__(self, *, ndim: int, metric: str, dtype: str) -> None:
        assert (metric, dtype) == ("cos", "f16")
        self.ndim, self.rows = ndim, np.zeros((0, ndim), np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        assert keys.tolist() == list(range(len(self), len(self) + len(vectors)))
        self.rows = np.concatenate([self.rows, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)])

    def search(self, query: np.ndarray, count: int) -> Any:
        return SimpleNamespace(keys=np.argsort(-(self.rows @ query))[:count].astype(np.uint64))

    def save(self, path: str) -> None:
        Path(path).write_bytes(self.rows.tobytes())

    @classmethod
    def restore(cls, path: str, *, view: bool) -> NearestByProducts:
        index = cls(ndim=8, metric="cos", dtype="f16")
        index.rows = np.frombuffer(Path(path).read_bytes(), np.float32).reshape(-1, 8)
        return index


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_index_finds_the_nearest(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    path, index, other = tmp_path / "a.npz", tmp_path / "a.usearch", tmp_path / "b.npz"
    for target, rows in ((path, vectors), (other, vectors[:50])):
        write_vectors(target, (Row("", vector) for vector in rows), dtype=dtype)
    np.save(tmp_path / "queries.npy", vectors[:3])
    call = ("search", "--query-vectors", tmp_path / "queries.npy", "--index", index, "--quiet", "--top", 5)
    assert run(*call, "--vectors", path) == 0
    exact = capsys.readouterr()
    assert "note: --index: the search is exact: an index is for 100,000 vectors or more, and these are 60" in exact.err
    monkeypatch.setattr(vector_index, "LEAST", 10)
    monkeypatch.setitem(sys.modules, "usearch", None)
    assert run(*call, "--vectors", path) == 0
    assert "the search is exact: an index needs usearch: pip install 'fasttfm[search]'" in capsys.readouterr().err
    assert not index.exists()
    monkeypatch.setitem(sys.modules, "usearch", SimpleNamespace(index=None))
    monkeypatch.setitem(sys.modules, "usearch.index", SimpleNamespace(Index=NearestByProducts))
    for _ in range(2):  # made, and opened
        assert run(*call, "--vectors", path) == 0
        assert capsys.readouterr().out == exact.out
        assert index.exists()
    assert "expected an index of " in refused(capsys, *call, "--vectors", other)
    write_vectors(path, (Row("", part) for part in np.split(vectors, 12)), parts="chunks")
    message = "--index: expected a file of one vector for each text, got vectors of chunks"
    assert message in refused(capsys, *call, "--vectors", path)


def test_a_text_finds_itself(
    folder: Path, bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ("search", "--model", bert_directory, "--query", TEXTS[3], "--top", 2, "--device", "cpu")
    options = ("--vectors", folder / "vectors.npy", "--texts", folder / "texts.txt", "--pooling", "max")
    assert run(*call, *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == TEXTS[3]
    assert re.fullmatch(rf" +1\.000 +4  {re.escape(TEXTS[3])}", lines[1])
    assert len(lines) == 3
    # The file stores the pooling and its own texts, so that --texts is not needed.
    output = tmp_path / "found.jsonl"
    assert run(*call, "--vectors", folder / "vectors.safetensors", "--output", output) == 0
    assert run(*call, "--vectors", folder / "vectors.jsonl", *options[4:], "--output", output, "--overwrite") == 0
    (row,) = (json.loads(line) for line in output.read_text().splitlines())
    assert row["query"] == TEXTS[3]
    assert row["matches"][0] == {"index": 3, "score": 1.0, "text": TEXTS[3]}
    assert run("search", "--vectors", folder / "vectors.npy", "--query-vectors", folder / "vectors.npy") == 0
    assert capsys.readouterr().out.count("query ") == len(TEXTS)


def test_wrong_arguments_are_reported(
    folder: Path, bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = ("search", "--vectors", folder / "vectors.npy")
    assert "--query: expected --query or --queries, or else --query-vectors" in refused(capsys, *vectors)
    assert "--model: expected the model that made the vectors" in refused(capsys, *vectors, "--query", "a")
    query = ("--query", "a", "--model", bert_directory, "--device", "cpu")
    assert "--top: expected a number from 1 on, got 0" in refused(capsys, *vectors, *query, "--top", 0)
    assert "vectors of the queries' width 128, got 64" in refused(capsys, *vectors, *query, "--pooling", "mean,max")
    (tmp_path / "texts.txt").write_text("a\nb\n")
    assert "expected 4 texts, one for each vector, got 2" in refused(
        capsys, *vectors, *query, "--texts", tmp_path / "texts.txt"
    )
    (tmp_path / "broken.npy").write_text("not numbers")
    assert "broken.npy: expected a file of vectors" in refused(
        capsys, "search", "--vectors", tmp_path / "broken.npy", *query
    )
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n')
    assert "broken.jsonl, line 1: expected an object with 'text' and 'vector'" in refused(
        capsys, "search", "--vectors", tmp_path / "broken.jsonl", *query
    )


# ---- show attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_the_page_has_the_weights_of_the_model(
    family: str, bert_directory: Path, gpt_directory: Path, tmp_path: Path
) -> None:
    directory = {"bert": bert_directory, "gpt": gpt_directory}[family]
    call = ("show", "attention", "--model", directory, "--text", "War and peace", "--device", "cpu")
    assert run(*call, "--output", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # an XML namespace, which is not requested
    data = json.loads(re.search(r"const data = (.*);", page)[1])  # type: ignore[index]
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("War and peace")
    if family == "bert":
        ids = [tokenizer.special.cls, *ids, tokenizer.special.sep]
    with torch.no_grad():
        model = open_model(directory, Head.NONE)
        (expected,) = model.eval()(torch.tensor([ids]), output_attentions=True).attentions
    weights = np.frombuffer(base64.b64decode(data["weights"]), np.uint8).reshape(expected.shape) / 255
    weights = weights * np.array(data["largest"])[..., None, None]
    assert np.abs(weights - expected.numpy()).max() <= expected.max() / 510 + 1e-4  # 8 bits, and four digits
    assert (len(data["tokens"]), data["layers"], data["heads"]) == (len(ids), [1], [1, 2])


def test_an_image_of_selected_heads(bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="it draws the picture")
    call = ("show", "attention", "--model", bert_directory, "--text", "War and peace", "--device", "cpu")
    assert run(*call, "--second", "a </script> b", "--heads", "2", "--output", tmp_path / "maps.png") == 0
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("1 maps of")
    assert "which exists; --overwrite" in refused(capsys, *call, "--output", tmp_path / "maps.png")
    other = ("--output", tmp_path / "other.png")
    assert "heads: expected numbers from 1 to 2, got 3" in refused(capsys, *call, *other, "--heads", "2-3")
    assert "--layers: expected numbers such as 1,2 or 1-4, got 'x'" in refused(capsys, *call, *other, "--layers", "x")
    assert run(*call, "--max-tokens", 4, *other) == 0
    assert "more than 4 tokens and is truncated by" in capsys.readouterr().err
