"""Sparse vectors: SPLADE's against sentence-transformers and its formula, bge-m3's lexical weights, CSR arrays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fasttfm.cli.main import main
from fasttfm.data import Tokenizer, load_tokenizer
from fasttfm.data.lines import DataError
from fasttfm.inference import EmbedSettings, Session, sparse
from fasttfm.inference.opening import open_model
from fasttfm.inference.sentence_folder import read_sentence_folder
from fasttfm.inference.sparse import SparseVectors
from fasttfm.models import CheckpointError
from fasttfm.models.family import Head
from fasttfm.tasks.sparse_files import InvertedLists, read_sparse, write_sparse

TEXTS = ["Peace and commerce with all nations.", "", "war " * 60, "  The army and the navy. "]


@pytest.fixture(scope="module")
def bert(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_models import save_bert

    return save_bert(wordpiece, tmp_path_factory.mktemp("bert"), hidden_size=32, initializer_range=0.3)


def weights_of(directory: Path, texts: list[str]) -> np.ndarray:
    """SPLADE's formula over the logits of one text after the other."""
    model, tokenizer = open_model(directory, Head.MASKED_LM), load_tokenizer(directory)
    before, after = tokenizer.around()
    found = []
    for text in texts:
        ids = torch.tensor([[*before, *tokenizer.encode(text), *after]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        found.append(torch.log1p(torch.relu(logits)).amax(0).numpy())
    return np.stack(found)


@pytest.mark.parametrize("block_bytes", [1, 2**26])
def test_splade_is_its_formula(block_bytes: int, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_BLOCK_BYTES", block_bytes)  # 64 words at a time, or all at once
    expected = weights_of(bert, TEXTS)
    with Session(bert, device="cpu", max_tokens=80) as session:
        found = session.encode(TEXTS, output="sparse")
        assert found.shape == expected.shape
        # fp32 sums of 32 products in another order, of logits up to 10.
        np.testing.assert_allclose(found.dense(), expected, atol=2e-5)
        assert (np.diff(found.indptr) == (found.dense() > 0).sum(1)).all()
        one = session.encode(TEXTS[3], output="sparse")
        np.testing.assert_allclose(one.values, found[3].values, atol=2e-5)
        np.testing.assert_array_equal(one.indices, found[3].indices)
        streamed = SparseVectors.of(list(session.stream(TEXTS, output="sparse")), found.width)
        np.testing.assert_allclose(streamed.dense(), expected, atol=2e-5)
        submitted = [session.submit(text, output="sparse").result(60) for text in TEXTS]
        np.testing.assert_allclose(SparseVectors.of(submitted, found.width).dense(), expected, atol=2e-5)
        assert session.encode([], output="sparse").shape == (0, found.width)
    with Session(bert, settings=EmbedSettings(pooling="splade"), device="cpu") as session:
        np.testing.assert_allclose(session.encode(TEXTS), expected, atol=2e-5)
        assert session.width == expected.shape[1]


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_a_folder_of_splade_opens_by_itself(activation: str, bert: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the vectors are compared with its own")
    modules = library.sparse_encoder.modules
    transformer = library.base.modules.Transformer(str(bert), max_seq_length=24, transformer_task="fill-mask")
    model = library.SparseEncoder(
        modules=[transformer, modules.SpladePooling(activation_function=activation)], device="cpu"
    )
    model.save(str(tmp_path / "model"))
    expected = model.encode(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True).numpy()
    with Session(tmp_path / "model", device="cpu") as session:
        with pytest.warns(UserWarning, match="truncated to 24"):
            found = session.encode(TEXTS, output="sparse")
        np.testing.assert_allclose(found.dense(), expected, atol=2e-5)
        np.testing.assert_allclose(session.encode(TEXTS), expected, atol=2e-5)


def test_lexical_weights_are_those_of_bge_m3(bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 1)
    folder = tmp_path / "m3"
    folder.mkdir()
    for path in bert.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    torch.save(layer.state_dict(), folder / "sparse_linear.pt")
    tokenizer = load_tokenizer(bert)
    texts = [*TEXTS, "the army, the navy and the army"]
    with Session(folder, device="cpu") as session:
        states = session.encode(texts, output="states")
        found = session.encode(texts, output="sparse")
        assert session.encode(texts).shape == (5, 32)  # the vectors are as before
    special = set(tokenizer.special.all()) - {tokenizer.special.mask}
    for text, rows, vector in zip(texts, states, found, strict=True):
        ids = [*tokenizer.around()[0], *tokenizer.encode(text), *tokenizer.around()[1]]
        weights = layer(torch.from_numpy(rows)).relu()[:, 0].tolist()
        expected: dict[int, float] = {}
        for id, weight in zip(ids, weights, strict=False):  # as FlagEmbedding has it
            if id not in special and weight > 0:
                expected[id] = max(expected.get(id, 0), weight)
        assert vector.indices.tolist() == sorted(expected)
        np.testing.assert_allclose(vector.values, [expected[id] for id in sorted(expected)], atol=1e-5)
    assert len(found[1].indices) == 0
    (folder / "sparse_linear.pt").unlink()
    torch.save({"weight": torch.zeros(3)}, folder / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match=r"expected the weight of a dense layer, .* got weight \[3\]"):
        read_sentence_folder(folder)


def test_csr_arrays() -> None:
    dense = np.array([[0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 0, 0]], np.float32)
    parts = [sparse.SparseVector(np.flatnonzero(row).astype(np.int32), row[row != 0]) for row in dense]
    found = SparseVectors.of(parts, 4)
    assert (found.indptr.tolist(), found.indices.tolist(), found.values.tolist()) == (
        [0, 2, 2, 3],
        [1, 3, 0],
        [2, 1, 3],
    )
    assert np.array_equal(found.dense(), dense)
    assert np.array_equal(found[1:].dense(), dense[1:])
    assert found[-1].indices.tolist() == [0]
    assert np.array_equal(found.scipy().toarray(), dense)
    with pytest.raises(IndexError, match="expected -3 to 2, got 3"):
        found[3]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pooling": "mean,splade"}, "splade: expected no other pooling with it, got mean, splade"),
        ({"pooling": "splade", "layers": "sum:1"}, "splade: expected layers='last' with it, got 'sum:1'"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], sentence: str, bert: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        Session(bert, settings=EmbedSettings(**settings), device="cpu")


def test_a_model_without_words_is_refused(bert: Path, tmp_path: Path) -> None:
    model = open_model(bert, Head.NONE)
    with pytest.raises(ValueError, match="splade: expected a model with a head for masked tokens, got one for hidden"):
        Session(model, settings=EmbedSettings(pooling="splade"))
    with Session(model) as session, pytest.raises(ValueError, match="output: sparse: expected a model with a head for"):
        session.encode([[2, 5, 3]], output="sparse")
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_SpladePooling", "type": "a.SpladePooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1_SpladePooling").mkdir()
    for config, expected in (
        ({"pooling_strategy": "sum"}, "pooling_strategy: expected max, got 'sum'"),
        ({"activation_function": "tanh"}, "activation_function: expected relu or log1p_relu, got 'tanh'"),
    ):
        (tmp_path / "1_SpladePooling" / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=expected):
            read_sentence_folder(tmp_path)


# ---- files and search ------------------------------------------------------------------------------------------------


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def test_the_commands_take_sparse_vectors(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text.strip() for text in (TEXTS[0], TEXTS[2], "", TEXTS[3])]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    model = ("--model", bert, "--device", "cpu", "--quiet")
    path = tmp_path / "sparse.npz"
    assert run("embed", *model, "--data", tmp_path / "texts.txt", "--sparse", "--output", path) == 0
    assert "4 sparse vectors of" in capsys.readouterr().out
    vectors = read_sparse(path)
    expected = weights_of(bert, texts)
    np.testing.assert_allclose(vectors.dense(), expected, atol=2e-5)
    scipy_sparse = pytest.importorskip("scipy.sparse", reason="it reads the file")
    assert np.array_equal(scipy_sparse.load_npz(path).toarray(), vectors.dense())
    lines = tmp_path / "sparse.jsonl"
    assert run("embed", *model, "--data", tmp_path / "texts.txt", "--sparse", "--output", lines) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["text"] for row in rows] == texts
    assert rows[0]["indices"] == vectors[0].indices.tolist()
    capsys.readouterr()
    output = tmp_path / "found.jsonl"
    search = ("search", "--vectors", path, "--texts", tmp_path / "texts.txt", "--top", 2, "--output", output)
    assert run(*search, *model, "--query", texts[3]) == 0
    (found,) = [json.loads(line) for line in output.read_text().splitlines()]
    scores = expected @ expected[3]
    assert [match["index"] for match in found["matches"]] == np.argsort(-scores)[:2].tolist()
    assert [match["score"] for match in found["matches"]] == pytest.approx(np.sort(scores)[:-3:-1], rel=1e-4)
    assert run(*search, "--overwrite", "--query-vectors", path) == 0
    assert len(output.read_text().splitlines()) == 4
    for options, sentence in (
        (("--output", tmp_path / "a.npy"), "--sparse: expected --output with a name that ends in .npz or .jsonl"),
        (("--output", tmp_path / "a.npz", "--tokens"), "--sparse: expected --output .*, got --tokens"),
    ):
        with pytest.raises(SystemExit):
            run("embed", *model, "--data", tmp_path / "texts.txt", "--sparse", *options)
        assert re.search(sentence, capsys.readouterr().err)


def test_matches_are_those_of_the_full_product(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    dense = np.maximum(random.normal(size=(60, 40)).astype(np.float32) - 1, 0)
    dense[11] = dense[42]  # a tie
    dense[7] = 0
    parts = [sparse.SparseVector(np.flatnonzero(row).astype(np.int32), row[row != 0]) for row in dense]
    write_sparse(tmp_path / "a.npz", ((str(n), part) for n, part in enumerate(parts)), 40)
    vectors = read_sparse(tmp_path / "a.npz")
    lists = InvertedLists(vectors)
    for count in (1, 5, 100):
        for query, row in zip(dense[40:], lists.search(vectors[40:], count), strict=True):
            scores = dense @ query
            order = [n for n in np.lexsort((np.arange(60), -scores)) if scores[n] > 0][:count]
            assert [match.row for match in row] == order
            assert [match.score for match in row] == pytest.approx(scores[order], rel=1e-5)
    with pytest.raises(ValueError, match="vectors of the file's width 40, got 3"):
        lists.search(SparseVectors.of([], 3))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": np.array("coo")}, "expected CSR arrays, got the format coo"),
        ({"indptr": np.array([0, 9])}, r"expected CSR arrays that fit together, got shape \[2, 4\], 3 weights"),
        ({"indices": np.array([0, 1, 4])}, "expected CSR arrays that fit together"),
        ({"indptr": None}, "expected CSR arrays, got .*indptr"),
    ],
)
def test_files_that_are_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    arrays = {"indptr": np.array([0, 2, 3]), "indices": np.array([0, 3, 1]), "data": np.ones(3, np.float32)}
    arrays |= {"format": np.array(b"csr"), "shape": np.array([2, 4]), **changes}
    np.savez(tmp_path / "a.npz", **{name: value for name, value in arrays.items() if value is not None})
    with pytest.raises(DataError, match=sentence):
        read_sparse(tmp_path / "a.npz")
