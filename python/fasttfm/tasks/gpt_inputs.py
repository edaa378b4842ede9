"""GPT-1's input format for tasks (Radford et al., 2018): three additional tokens, ``start``, ``delimiter`` and
``extract``, which are added to the vocabulary."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.opening import base_of
from fasttfm.models.pretrained import PretrainedModel

Module = TypeVar("Module", bound=nn.Module)

TASK_TOKENS = ("<start>", "<delimiter>", "<extract>")


def with_task_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Adds the three tokens at the end of the tokenizer's vocabulary, unless it already has them, and makes the
    tokenizer put them around texts, as transformers does then."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.backend
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TASK_TOKENS])
    start, delimiter, extract = TASK_TOKENS
    backend.post_processor = TemplateProcessing(
        single=f"{start} $A {extract}",
        pair=f"{start} $A {delimiter} $B {extract}",
        special_tokens=[(token, backend.token_to_id(token)) for token in TASK_TOKENS],
    )
    return Tokenizer(backend, tokenizer.special, lowercase=tokenizer.lowercase)


def grow_vocabulary(model: PretrainedModel, size: int) -> None:
    """Adds randomly initialized rows for new tokens to a model's embedding. It never removes rows."""
    embeddings = base_of(model).embeddings
    old = embeddings.word
    if size <= old.num_embeddings:
        return
    new = nn.Embedding(size, old.embedding_dim, padding_idx=old.padding_idx)
    embeddings.word = _with_rows_of(model, old, new)
    head = model._modules.get("lm_head")
    if head is not None and "lm_head.decoder.weight" not in model.tied():
        decoder = head.get_submodule("decoder")
        assert isinstance(decoder, nn.Linear)
        head.decoder = _with_rows_of(model, decoder, nn.Linear(decoder.in_features, size, bias=False))
    elif head is not None:
        head.get_submodule("decoder").out_features = size  # type: ignore[assignment]
    model.config.vocab_size = size
    model.tie_weights()


def _with_rows_of(model: PretrainedModel, old: nn.Module, new: Module) -> Module:
    """Initializes ``new``, and copies the rows of ``old`` to its first rows."""
    weight = old.get_parameter("weight")
    model.initialise(new)
    with torch.no_grad():
        new.get_parameter("weight")[: len(weight)] = weight
    return new.to(weight)
