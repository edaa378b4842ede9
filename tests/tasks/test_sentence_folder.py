"""Folders of sentence-transformers: vectors are those of ``SentenceTransformer.encode``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm.data import Tokenizer, load_tokenizer
from fasttfm.inference.opening import open_model
from fasttfm.inference.pooling import pooling_names
from fasttfm.inference.sentence_folder import Normalize, read_sentence_folder
from fasttfm.models import CheckpointError
from fasttfm.models.family import Head
from fasttfm.tasks.embedding import EmbedSettings, embed

TEXTS = ["Peace and commerce with all nations.", "", "war " * 60, "  The army and the navy. "]


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("sentence_transformers", reason="the vectors are compared with its own")


@pytest.fixture(scope="module")
def bert(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_models import save_bert

    return save_bert(wordpiece, tmp_path_factory.mktemp("bert"), hidden_size=32, initializer_range=0.3)


def encoded(folder: Path, **options: Any) -> np.ndarray:
    sentence_model = read_sentence_folder(folder)
    settings = EmbedSettings.of_folder(sentence_model, **options)
    model, tokenizer = open_model(sentence_model.model, Head.NONE), load_tokenizer(sentence_model.model)
    with pytest.warns(UserWarning, match="1 of 4 texts have more than 24 tokens"):
        return np.stack(list(embed(model, tokenizer, iter(TEXTS), settings)))


@pytest.mark.parametrize(
    ("pooling", "include_prompt", "dense"),
    [
        ("mean", True, False),
        ("cls", False, False),
        ("max", True, True),
        ("mean_sqrt_len_tokens", False, False),
        (("weightedmean", "lasttoken", "mean"), False, True),
    ],
)
def test_vectors_are_those_of_sentence_transformers(
    pooling: Any, include_prompt: bool, dense: bool, library: Any, bert: Path, tmp_path: Path
) -> None:
    modules = library.sentence_transformer.modules
    torch.manual_seed(0)
    transformer = modules.Transformer(str(bert), max_seq_length=24)
    pool = modules.Pooling(32, pooling, include_prompt=include_prompt)
    parts = [transformer, pool]
    if dense:
        parts += [modules.Dense(pool.pooling_output_dimension, 16), modules.Normalize()]
    prompts = {"query": "The query: ", "document": "text: "}
    model = library.SentenceTransformer(modules=parts, prompts=prompts, default_prompt_name="document", device="cpu")
    model.save(str(tmp_path / "model"))
    # fp32 sums of at most 24 terms in another order.
    assert np.allclose(encoded(tmp_path / "model"), model.encode(TEXTS), atol=2e-5)
    vectors = encoded(tmp_path / "model", prompt_name="query")
    assert np.allclose(vectors, model.encode(TEXTS, prompt_name="query"), atol=2e-5)
    assert not np.allclose(vectors, model.encode(TEXTS), atol=1e-3)


def test_folders_of_older_versions(tmp_path: Path) -> None:
    """Flags for the pooling mode, a folder for the transformer, and the length in a file of its own."""
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for n, kind in enumerate(kinds):
        (tmp_path / f"{n}_{kind}").mkdir()
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    lengths = {"max_seq_length": 77, "do_lower_case": True}
    (tmp_path / "0_Transformer" / "sentence_bert_config.json").write_text(json.dumps(lengths))
    sentence_model = read_sentence_folder(tmp_path)
    assert (sentence_model.model, sentence_model.pooling) == (tmp_path / "0_Transformer", ("first", "mean"))
    assert (sentence_model.max_length, sentence_model.lowercase, sentence_model.prompt()) == (77, True, "")
    assert [type(module) for module in EmbedSettings.of_folder(sentence_model).after] == [Normalize]


@pytest.mark.parametrize(("stated", "expected"), [(100, 100), (128, None), (512, None), (10**30, None)])
def test_the_length_of_the_tokenizer(stated: int, expected: int | None, tmp_path: Path) -> None:
    """It counts where it is below the model's positions."""
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
    (tmp_path / "1_Pooling").mkdir()
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode": "mean"}),
        ("config.json", {"max_position_embeddings": 128}),
        ("tokenizer_config.json", {"model_max_length": stated}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    assert read_sentence_folder(tmp_path).max_length == expected


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (("Transformer", "CNN"), "expected a Transformer and then Pooling or SpladePooling, got Transformer, CNN"),
        (("Transformer", "Pooling", "LSTM"), "after Pooling: expected Dense, Dropout or Normalize, got LSTM"),
    ],
)
def test_modules_that_are_not_known_are_named(kinds: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    modules = [{"path": "", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=sentence):
        read_sentence_folder(tmp_path)


@pytest.mark.parametrize("path", ["../elsewhere", "/tmp", "1_Pooling/../../elsewhere"])
def test_a_path_out_of_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    modules = [{"path": "", "type": "models.Transformer"}, {"path": path, "type": "models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"path: expected a folder next to this file, got '{path}'"):
        read_sentence_folder(tmp_path)


def test_pooling_has_the_names_of_sentence_transformers() -> None:
    assert pooling_names("cls,mean") == ("first", "mean")
    assert pooling_names(["lasttoken", "weightedmean"]) == ("last", "weighted")
