"""``fasttfm embed``: a vector for each text, reports of truncated texts, and every file format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fasttfm.cli.main import main
from fasttfm.data import Tokenizer, load_tokenizer
from fasttfm.inference.opening import open_model
from fasttfm.models.family import Head
from fasttfm.tasks.embedding import Embedder, EmbedSettings, embed
from fasttfm.tasks.vector_files import VectorFile

TEXTS = ["Peace and commerce with all nations.", "", "The army and the navy of the United States."]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def run(model: Path, data: Path | str, output: Path, *options: Any) -> np.ndarray | None:
    call = ("embed", "--model", model, "--data", data, "--output", output, "--device", "cpu", *options)
    assert main([str(argument) for argument in call]) == 0
    return np.load(output) if output.suffix == ".npy" else None


def of_model(directory: Path, texts: list[str], **settings: Any) -> np.ndarray:
    return np.stack(list(embed(open_model(directory, Head.NONE), load_tokenizer(directory), iter(texts), **settings)))


def test_a_text_is_a_line_or_a_document_or_a_file(bert_directory: Path, texts: Path, tmp_path: Path) -> None:
    vectors = run(bert_directory, texts, tmp_path / "lines.npy")
    assert vectors is not None
    assert np.allclose(vectors, of_model(bert_directory, TEXTS), atol=1e-5)
    documents = run(bert_directory, texts, tmp_path / "documents.npy", "--split", "document")
    assert documents is not None
    assert np.allclose(documents, vectors[::2], atol=1e-5)
    whole = run(bert_directory, texts, tmp_path / "file.npy", "--split", "file")
    assert whole is not None
    assert np.allclose(whole, of_model(bert_directory, ["\n".join(TEXTS)]), atol=1e-5)


def test_a_column_of_a_table(bert_directory: Path, tmp_path: Path) -> None:
    table = tmp_path / "reviews.csv"
    table.write_text('stars,review\n5,"Peace, and commerce."\n1,War.\n')
    vectors = run(bert_directory, table, tmp_path / "vectors.npy", "--text-column", "review")
    assert vectors is not None
    assert np.allclose(vectors, of_model(bert_directory, ["Peace, and commerce.", "War."]), atol=1e-5)


def test_truncated_texts_are_counted(bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text("War.\n" + "the " * 200 + "\n" + "the " * 140 + "\n")
    vectors = run(bert_directory, tmp_path / "texts.txt", tmp_path / "vectors.npy")
    output = capsys.readouterr()
    # The model has 128 positions, two of them for [CLS] and [SEP].
    note = "2 of 3 texts have more than 128 tokens and are truncated (88 tokens are ignored)"
    assert f"note: {note}" in output.err
    assert vectors is not None
    assert "3 vectors of 64 numbers" in output.out
    with pytest.warns(UserWarning, match="1 of 2 texts have more than 5 tokens"):
        of_model(bert_directory, ["The army and the navy of the United States.", "War."], max_length=5)


def test_a_text_without_tokens_has_a_vector_of_zeros(
    gpt_directory: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = run(gpt_directory, texts, tmp_path / "vectors.npy", "--tokens-per-batch", 1)
    assert vectors is not None
    assert not vectors[1].any()
    assert vectors[0].any()
    assert vectors[2].any()
    assert "1 of 3 texts have no tokens; their vectors are zero" in capsys.readouterr().err


def test_lines_of_stdin(bert_directory: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(bert_directory, texts, tmp_path / "file.npy")
    monkeypatch.setattr("sys.stdin", io.StringIO(texts.read_text()))
    vectors = run(bert_directory, "-", tmp_path / "stdin.npy")
    assert np.array_equal(vectors, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_file_has_the_same_vectors(dtype: str, bert_directory: Path, texts: Path, tmp_path: Path) -> None:
    expected = of_model(bert_directory, TEXTS).astype(dtype)
    for suffix in ("npy", "npz", "safetensors", "jsonl", "csv"):
        path = tmp_path / f"vectors.{suffix}"
        run(bert_directory, texts, path, "--dtype", dtype)
        read = {
            "npy": lambda path: np.load(path),
            "npz": lambda path: np.load(path)["vectors"],
            "safetensors": lambda path: load_file(path)["vectors"],
            "jsonl": lambda path: np.array(
                [json.loads(line)["vector"] for line in path.read_text().splitlines()], dtype
            ),
            "csv": lambda path: np.array([row[1:] for row in csv.reader(io.StringIO(path.read_text()))][1:], dtype),
        }[suffix](path)
        assert read.dtype == dtype
        assert np.array_equal(read, expected), suffix
        blocks = list(VectorFile(path).blocks(2))
        assert np.array_equal(np.concatenate([vectors for vectors, _ in blocks]), expected.astype(np.float32)), suffix
        if suffix in ("jsonl", "csv"):
            assert [text for _, names in blocks for text in names or []] == TEXTS


def test_token_vectors_are_those_that_are_pooled(bert_directory: Path, texts: Path, tmp_path: Path) -> None:
    expected = of_model(bert_directory, TEXTS)
    run(bert_directory, texts, tmp_path / "tokens.npz", "--tokens")
    run(bert_directory, texts, tmp_path / "tokens.safetensors", "--tokens")
    tokenizer = load_tokenizer(bert_directory)
    for archive in (np.load(tmp_path / "tokens.npz"), load_file(tmp_path / "tokens.safetensors")):
        parts = np.split(archive["vectors"], archive["offsets"][1:-1])
        assert np.allclose([part.mean(0) for part in parts], expected, atol=1e-5)
        ids = np.split(archive["ids"], archive["offsets"][1:-1])
        assert [list(tokens[1:-1]) for tokens in ids] == [tokenizer.encode(text) for text in TEXTS]
    run(bert_directory, texts, tmp_path / "tokens.jsonl", "--tokens")
    rows = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    assert [np.shape(row["vectors"]) for row in rows] == [(len(row["ids"]), 64) for row in rows]


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_normalized_vectors(bert_directory: Path, texts: Path, tmp_path: Path, precision: str) -> None:
    vectors = run(bert_directory, texts, tmp_path / "vectors.npy", "--normalize", "--precision", precision)
    assert vectors is not None
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    exact = of_model(bert_directory, TEXTS, normalize=True)
    assert (vectors * exact).sum(1).min() > 0.99


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--pooling", "median"), "pooling: expected mean, first, last, max, mean-sqrt, weighted, splade, or several"),
        (("--layers", "sum"), "layers: expected last, second-to-last, embeddings, concat:N"),
        (("--layers", "sum:3"), "layers: expected 1 to the model's 1, got 3"),
        (("--layers", "weights:a"), "layers: expected last"),
        (("--max-length", "500"), "max_length: expected 3 to the model's 128 positions, got 500"),
        (("--tokens",), "--tokens: expected --output with a name that ends in .npz, .safetensors, .jsonl or .parquet"),
        (("--prompt-name", "query"), "prompt_name: expected one of the model's prompts (none), got 'query'"),
    ],
)
def test_wrong_arguments_are_reported(
    options: tuple[str, ...], sentence: str, bert_directory: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = texts.with_name("vectors.npy")
    with pytest.raises(SystemExit) as error:
        run(bert_directory, texts, output, *options)
    assert error.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not output.exists()
    assert not list(texts.parent.glob("*.partial"))


def test_layers_are_combined_as_requested(wordpiece: Tokenizer, tmp_path: Path) -> None:
    from small_models import save_bert

    directory = save_bert(wordpiece, tmp_path / "model", num_hidden_layers=4, hidden_size=32)
    model, tokenizer = open_model(directory, Head.NONE), load_tokenizer(directory)

    def vectors(layers: Any) -> np.ndarray:
        embedder = Embedder(model, tokenizer, EmbedSettings(layers=layers))
        vectors = np.stack(list(embedder.vectors(iter(TEXTS))))
        assert vectors.shape == (3, embedder.width)
        return vectors

    parts = np.split(vectors("concat:4"), 4, axis=1)
    assert np.array_equal(vectors(4), np.concatenate(parts, 1))
    embeddings = vectors("embeddings")
    assert np.array_equal(vectors("concat:all"), np.concatenate([embeddings, *parts], 1))
    assert not np.allclose(embeddings, parts[0], atol=1e-2)
    for layers, expected in (
        ("last", parts[3]),
        ("second-to-last", parts[2]),
        ("sum:4", sum(parts)),
        ("sum:all", sum([embeddings, *parts])),
        ("mean:2", (parts[2] + parts[3]) / 2),
        ("weights:0.5,-1,2", 0.5 * parts[1] - parts[2] + 2 * parts[3]),
    ):
        assert np.allclose(vectors(layers), expected, atol=1e-5), layers
    assert not np.allclose(parts[2], parts[3], atol=1e-2)


def test_the_chosen_precision_is_printed(
    bert_directory: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "note: precision float32: this CPU has no instructions for faster GEMMs in 16 or 8 bits\n"
    run(bert_directory, texts, tmp_path / "chosen.npy")
    assert note in capsys.readouterr().err
    for number, quiet in enumerate([("--quiet",), ("--precision", "float32")]):
        run(bert_directory, texts, tmp_path / f"{number}.npy", *quiet)
        assert "precision" not in capsys.readouterr().err
