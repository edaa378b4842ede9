"""A small model of every family, with random parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm import models
from fasttfm.data import Tokenizer

_ROBERTA = {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
_EUROBERT = {"num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 1}
_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 64}
_DEBERTA = {
    "relative_attention": True,
    "position_buckets": 16,
    "max_position_embeddings": 64,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
_XLNET = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48}
# The name of its classes, its sizes and the kind of its tokenizer.
SMALL_FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("Bert", {**_SMALL, "max_position_embeddings": 64}, "wordpiece"),
    "roberta": ("Roberta", {**_SMALL, **_ROBERTA}, "bpe"),
    "xlm-roberta": ("XLMRoberta", {**_SMALL, **_ROBERTA}, "unigram"),
    "camembert": ("Camembert", {**_SMALL, **_ROBERTA}, "unigram"),
    "mpnet": ("MPNet", {**_SMALL, "max_position_embeddings": 66}, "wordpiece"),
    "albert": ("Albert", {**_SMALL, "embedding_size": 16, "max_position_embeddings": 64}, "wordpiece"),
    "electra": ("Electra", {**_SMALL, "embedding_size": 16, "max_position_embeddings": 64}, "wordpiece"),
    "distilbert": ("DistilBert", _DISTILBERT, "wordpiece"),
    "modernbert": ("ModernBert", {**_SMALL, "max_position_embeddings": 64, "pad_token_id": 0}, "wordpiece"),
    "eurobert": ("EuroBert", {**_SMALL, **_EUROBERT}, "bpe"),
    "gte": ("Gte", {**_SMALL, "max_position_embeddings": 64}, "unigram"),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {**_SMALL, "max_position_embeddings": 64}, "unigram"),
    "nomic_bert": ("NomicBert", {**_SMALL, "max_position_embeddings": 64}, "wordpiece"),
    "deberta-v2": ("DebertaV2", {**_SMALL, **_DEBERTA}, "wordpiece"),
    "xlnet": ("XLNet", _XLNET, "unigram"),
    "openai-gpt": ("OpenAIGPT", _GPT, "bpe"),
    "gpt2": ("GPT2", _GPT, "bpe"),
}


def save_small(family: str, tokenizer: Tokenizer, directory: Path, *, head: str = "Model") -> Path:
    """Saves a model of the family with its tokenizer; ``head`` ends the name of its class."""
    name, sizes, _ = SMALL_FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(models, f"{name}Config")(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **sizes)
    getattr(models, f"{name}{head}")(config).save_pretrained(directory)
    tokenizer.save(directory, model_max_length=64, config=config)
    return directory


TEXTS = ["the man went to the store", "she bought a gallon of milk", "penguins are birds"]
END = "<|endoftext|>"


def save_tokenizer(first: str, directory: Path) -> None:
    """A tokenizer of 300 words that puts ``first`` before a text, if it is not empty, and ``END`` after it."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    names = [END, "<|begin|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=names, initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS, trainer)
    special = [(each, backend.token_to_id(each)) for each in names]
    template = f"{first} $A {END}".strip()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": END, "eos_token": END}
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
