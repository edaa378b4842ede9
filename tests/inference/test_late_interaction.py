"""A vector for each token: folders of ColBERT, PyLate, sentence-transformers and bge-m3."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fasttfm import ops
from fasttfm.cli.main import main
from fasttfm.data import Tokenizer
from fasttfm.inference import EmbedSettings, Session
from fasttfm.inference.late_interaction import Keys, LateInteraction, Side
from fasttfm.tasks import token_search

TEXTS = ["Peace, and commerce with all nations.", "War.", "The army; the navy (of the United States)!", "war " * 60]
QUERIES = ["Who has an army?", "peace"]


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("sentence_transformers", reason="the vectors are compared with its own")


@pytest.fixture(scope="module")
def bert(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_models import save_bert

    folder = tmp_path_factory.mktemp("bert")
    return save_bert(wordpiece, folder, hidden_size=32, num_hidden_layers=2, initializer_range=0.3)


def check_same(folder: Path, library: Any, tolerance: float = 2e-5) -> None:
    model = library.MultiVectorEncoder(str(folder), device="cpu")
    expected = model.encode_document(TEXTS), model.encode_query(QUERIES)
    with Session(folder, device="cpu") as session:
        found = session.encode(TEXTS, output="multi"), session.encode(QUERIES, output="multi-query")
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.shape == tuple(other.shape)
                # fp32 sums in another order.
                np.testing.assert_allclose(one, np.asarray(other), atol=tolerance)
        submitted = session.submit(QUERIES[1], output="multi-query").result(60)
        np.testing.assert_allclose(submitted, found[1][1], atol=tolerance)


def with_projection(library: Any, bert: Path, **options: Any) -> Any:
    modules, own = library.base.modules, library.multi_vector_encoder.modules
    torch.manual_seed(0)
    dense = modules.Dense(32, 16, bias=False, activation_function=nn.Identity(), module_input_name="token_embeddings")
    return [
        modules.Transformer(str(bert), **options),
        dense,
        own.MultiVectorMask(skiplist_words=list(string.punctuation)),
        modules.Normalize(module_input_name="token_embeddings"),
    ]


@pytest.mark.parametrize("attend", [None, False, True])
@pytest.mark.filterwarnings("ignore:.*truncated", "ignore:.*randomly initialized")
def test_folders_of_sentence_transformers(attend: bool | None, library: Any, bert: Path, tmp_path: Path) -> None:
    expansion = None if attend is None else {"strategy": "fixed", "attend": attend, "length": 16}
    modules = with_projection(library, bert, document_length=24, query_expansion=expansion)
    prompts = {"query": "query: ", "document": "text: "}
    model = library.MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    model.save(str(tmp_path / "model"))
    check_same(tmp_path / "model", library)


@pytest.mark.filterwarnings("ignore:.*truncated", "ignore:.*randomly initialized")
def test_folders_of_pylate(library: Any, bert: Path, tmp_path: Path) -> None:
    """Version 3 lists only the transformer and the projection, and has markers in the settings."""
    folder = tmp_path / "model"
    library.MultiVectorEncoder(modules=with_projection(library, bert), device="cpu").save(str(folder))
    modules = json.loads((folder / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = {"model_type": "ColBERT", "query_prefix": "[unused0]", "document_prefix": "peace ", "query_length": 12}
    settings |= {"document_length": 20, "do_query_expansion": True, "attend_to_expansion_tokens": False}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    check_same(folder, library)


@pytest.mark.filterwarnings("ignore:.*truncated", "ignore:.*randomly initialized")
@pytest.mark.parametrize("has_metadata", [False, True])
def test_folders_of_colbert(has_metadata: bool, library: Any, bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if name.startswith("bert.")}
    save_file({**tensors, "linear.weight": torch.randn(16, 32)}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    if has_metadata:
        stated = {"query_maxlen": 10, "doc_maxlen": 22, "mask_punctuation": False, "attend_to_mask_tokens": True}
        stated |= {"query_token_id": "peace", "doc_token_id": "war"}
        (folder / "artifact.metadata").write_text(json.dumps(stated))
    check_same(folder, library)


def test_bge_m3_has_all_tokens_but_the_first(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m3"
    shutil.copytree(bert, folder)
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)
    torch.save(layer.state_dict(), folder / "colbert_linear.pt")
    with Session(folder, device="cpu") as session:
        states, found = (session.encode(TEXTS[:3], output=output) for output in ("states", "multi"))
        queries = session.encode(TEXTS[:3], output="multi-query")
    for rows, vectors, query in zip(states, found, queries, strict=True):
        with torch.no_grad():
            expected = nn.functional.normalize(layer(torch.from_numpy(rows[1:])), dim=-1)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        np.testing.assert_allclose(query, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_expansion_in_layers_with_rotation(wordpiece: Tokenizer) -> None:
    """Tokens of the text are as without an expansion; those of the expansion attend to the text only: as one of
    them alone does."""
    from fasttfm import models

    torch.manual_seed(0)
    config = models.ModernBertConfig(
        vocab_size=wordpiece.vocab_size, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=48, local_attention=64, pad_token_id=0, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    model = models.ModernBertModel(config).eval()
    tokens = LateInteraction(expansion=16, normalize=False)
    found, without = [], []
    for settings in (tokens, LateInteraction(normalize=False)):
        with Session(model, wordpiece, EmbedSettings(late_interaction=settings), device="cpu") as session:
            (found if settings is tokens else without).extend(session.encode(QUERIES, output="multi-query"))
    for one, other in zip(found, without, strict=True):
        assert len(one) == 16 > len(other)
        np.testing.assert_allclose(one[: len(other)], other, atol=2e-5)
    long = EmbedSettings(late_interaction=LateInteraction(expansion=60))
    session = Session(model, wordpiece, long, device="cpu")
    with pytest.raises(ValueError, match=r"attends: expected True for layers whose window .* is shorter than queries"):
        session.encode(QUERIES, output="multi-query")


def test_rows_that_tokens_attend_to() -> None:
    ids = torch.tensor([2, 9, 4, 3, 4, 4, 2, 3, 2, 4])  # [MASK] is 4; the first text has one of its own
    keys = Keys.before_fill(ids, torch.tensor([0, 6, 8, 8, 10], dtype=torch.int32), 4)
    assert keys.rows.tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert keys.cu_seqlens.tolist() == [0, 4, 6, 6, 7]


def test_scores_are_those_of_the_op(bert: Path) -> None:
    settings = EmbedSettings(late_interaction=LateInteraction(expansion=8))
    with Session(bert, settings=settings, device="cpu") as session:
        documents = session.encode(TEXTS[:3], output="multi")
        queries = session.encode(QUERIES, output="multi-query")
    scores = ops.maxsim(
        torch.from_numpy(np.concatenate(queries)),
        torch.from_numpy(np.concatenate(documents)),
        query_cu_seqlens=torch.tensor([0, 8, 16], dtype=torch.int32),
        document_cu_seqlens=torch.tensor(np.cumsum([0, *map(len, documents)]), dtype=torch.int32),
    )
    for query, row in zip(queries, scores, strict=True):
        expected = [(query @ document.T).max(1).sum() for document in documents]
        np.testing.assert_allclose(row, expected, rtol=1e-5)


def test_the_commands_take_vectors_of_tokens(
    library: Any, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, texts = tmp_path / "model", tmp_path / "texts.txt"
    expansion = {"strategy": "fixed", "length": 12}
    modules = with_projection(library, bert, query_expansion=expansion)
    model = library.MultiVectorEncoder(modules=modules, device="cpu")
    model.save(str(folder))
    lines = [text.strip() for text in TEXTS]
    texts.write_text("\n".join([*lines, ""]) + "\n")
    options = ("--model", folder, "--device", "cpu", "--quiet")
    expected = model.similarity(model.encode_query(QUERIES), model.encode_document(lines)).numpy()
    monkeypatch.setattr(token_search, "_BLOCK_TOKENS", 20)
    output = tmp_path / "found.jsonl"
    for name, dtype, tolerance in (("a.safetensors", "float32", 1e-4), ("a.npz", "float16", 1e-2)):
        path = tmp_path / name
        assert run("embed", *options, "--data", texts, "--multi", "--dtype", dtype, "--output", path) == 0
        query = [each for text in QUERIES for each in ("--query", text)]
        call = ("search", *options, "--vectors", path, "--texts", texts, "--top", 2, "--output", output, "--overwrite")
        assert run(*call, *query) == 0
        found = [json.loads(line) for line in output.read_text().splitlines()]
        for row, scores in zip(found, expected, strict=True):
            assert [match["index"] for match in row["matches"]] == np.argsort(-scores)[:2].tolist()
            got = [match["score"] for match in row["matches"]]
            assert got == pytest.approx(np.sort(scores)[:-3:-1], abs=tolerance)
    assert run("search", "--vectors", path, "--query-vectors", path, "--top", 1, "--quiet") == 0
    capsys.readouterr()
    plain = tmp_path / "plain.npy"
    np.save(plain, np.zeros((2, 16), np.float32))
    for arguments, sentence in (
        (("embed", *options, "--data", texts, "--multi", "--output", plain), "--multi: expected --output with a name"),
        (
            ("search", "--vectors", path, "--query-vectors", plain),
            "expected vectors of tokens, with the array 'offsets'",
        ),
    ):
        with pytest.raises(SystemExit):
            run(*arguments)
        assert sentence in capsys.readouterr().err


def test_what_is_refused(bert: Path) -> None:
    with Session(bert, device="cpu") as session, pytest.raises(ValueError, match="output: multi: expected a folder of"):
        session.encode("a", output="multi")
    settings = EmbedSettings(late_interaction=LateInteraction())
    session = Session(bert, settings=settings, device="cpu")
    with pytest.raises(ValueError, match="expected single texts for a vector of each token, got a pair"):
        session.encode([("a", "b")], output="multi")
    for wrong, sentence in (
        (LateInteraction(expansion=8, fill="[NONE]"), "fill: expected a token of the vocabulary, got '.NONE.'"),
        (LateInteraction(document=Side(length=2)), "length: expected at least 3 tokens, got 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Session(bert, settings=EmbedSettings(late_interaction=wrong), device="cpu")
