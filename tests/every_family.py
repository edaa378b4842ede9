"""A small model of every family and head, and inputs of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Head
from fasttfm.models.onnx_export import _check

_SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 40, "embedding_size": 16, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64,
    "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40,
    "d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0, "local_attention": 4, "local_window": 4, "classifier_pooling": "mean",
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
_LENGTHS = (9, 4, 6, 9)


def small(name: str, head: Head, **changes: Any) -> Any:
    torch.manual_seed(0)
    model_cls = FAMILIES[name].models[head]
    known = model_cls.config_class.__dataclass_fields__
    fields = {key: value for key, value in {**_SIZES, **changes}.items() if key in known}
    return model_cls(model_cls.config_class(**fields)).eval()


def padded(model: Any) -> dict[str, Tensor]:
    """Four sequences with padding; two choices each where the model has choices."""
    generator = torch.Generator().manual_seed(1)
    choices = any(head in type(model).__name__ for head in ("MultipleChoice", "DoubleHeads"))
    shape = (2, 2, 9) if choices else (4, 9)
    inputs = {"input_ids": torch.randint(3, 50, shape, generator=generator)}
    mask = torch.tensor([[int(column < length) for column in range(9)] for length in _LENGTHS])
    inputs["attention_mask"] = mask.view(shape)
    if getattr(model.config, "type_vocab_size", 0):
        kinds = model.config.type_vocab_size
        inputs["token_type_ids"] = torch.randint(0, kinds, shape, generator=generator)
    return inputs


def refused(model: Any) -> bool:
    try:
        _check(model, Path("model.onnx"))
    except ValueError:
        return True
    return False
