"""GPT-1's format of a task: three additional tokens, ``start``, ``delimiter`` and ``extract``, which the vocabulary
does not have yet (Radford et al., 2018)."""

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
    """The tokenizer with the three tokens at the end of its vocabulary, unless it already has them; transformers then
    puts them around a text."""
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
    """Adds rows for new tokens to a model's embedding, randomly initialized. It never shrinks."""
    embeddings = base_of(model).embeddings
    old = embeddings.word
    if size <= old.num_embeddings:
        return
    new = nn.Embedding(size, old.embedding_dim, padding_idx=old.padding_idx)
    embeddings.word = _grown(model, old, new)
    head = model._modules.get("lm_head")
    if head is not None and "lm_head.decoder.weight" not in model.tied():
        decoder = head.get_submodule("decoder")
        assert isinstance(decoder, nn.Linear)
        head.decoder = _grown(model, decoder, nn.Linear(decoder.in_features, size, bias=False))
    elif head is not None:
        head.get_submodule("decoder").out_features = size  # type: ignore[assignment]
    model.config.vocab_size = size
    model.tie_weights()


def _grown(model: PretrainedModel, old: nn.Module, new: Module) -> Module:
    """``new`` with the rows of ``old`` in front."""
    weight = old.get_parameter("weight")
    model.initialise(new)
    with torch.no_grad():
        new.get_parameter("weight")[: len(weight)] = weight
    return new.to(weight)
