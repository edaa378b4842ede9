"""``generate`` and ``stream``: continue prompts token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fasttfm.generate.decoder import CachedDecoder
from fasttfm.generate.sampling import Sampling
from fasttfm.models.text_model import TextModel
from fasttfm.nn import CausalLMHead, PackedBatch

_NAME = "generate"
_STEPS_BETWEEN_CHECKS = 8  # checking whether all sequences have ended synchronizes with the GPU


class CausalModel(Protocol):
    """A causal LM: GPT2LMHeadModel and its variants."""

    config: Any
    training: bool
    lm_head: CausalLMHead

    @property
    def transformer(self) -> TextModel: ...


def generate(
    model: CausalModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    **sampling: Any,
) -> Tensor:
    """Continues the prompts ``input_ids`` [B, S], each by as many tokens as it takes to its end.

    Prompts are read once, without padding; after that each step computes one token of every sequence.

    Args:
        model: In evaluation mode.
        attention_mask: ``[B, S]``, not 0 for tokens: prompts of different lengths; padding may be anywhere. A token's
            position is its number in its own prompt.
        lengths: ``B`` numbers of tokens instead of a mask, for padding at the end.
        max_new_tokens: The maximum number of new tokens.
        eos_token_id: One or several tokens, each of which ends a sequence; the configuration's by default, none for [].
        pad_token_id: The token after the end where other sequences continue; by default the configuration's, or else
            the first ``eos_token_id``.
        sampling: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``generator``: see ``Sampling``.

    Returns:
        ``[B, S + new]``: ``input_ids``, then the new tokens, up to the longest sequence's end.
    """
    ends = _Ends.of(model.config, eos_token_id, pad_token_id)
    batch = PackedBatch.of(input_ids, attention_mask, lengths=lengths)
    _check(model, batch, max_new_tokens)
    steps = _steps(model, input_ids, batch, max_new_tokens, ends, Sampling(**sampling), looks=_STEPS_BETWEEN_CHECKS)
    columns = list(steps)
    if not columns:
        return input_ids
    tokens, going = (torch.stack(each, 1) for each in zip(*columns, strict=True))
    width = int(going.any(0).sum()) if ends.tokens else len(columns)
    return torch.cat([input_ids, tokens[:, :width].to(input_ids.dtype)], 1)


def stream(
    model: CausalModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | None = None,
    **sampling: Any,
) -> Iterator[int]:
    """Continues one prompt ``input_ids`` [S] or [1, S], and gives each token as soon as it is there: those that
    ``generate`` adds with the same arguments, the one that ends the sequence included."""
    prompt = input_ids.view(1, -1)
    ends = _Ends.of(model.config, eos_token_id, None)
    batch = PackedBatch.of(prompt)
    _check(model, batch, max_new_tokens)
    steps = _steps(model, prompt, batch, max_new_tokens, ends, Sampling(**sampling), looks=1)
    return (int(token) for token, _ in steps)


@torch.no_grad()
def _steps(
    model: CausalModel,
    input_ids: Tensor,
    batch: PackedBatch,
    most: int,
    ends: _Ends,
    choice: Sampling,
    *,
    looks: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The next token [B] of every sequence, and which sequences had not ended before it, until all have; every
    ``looks`` steps somebody looks whether they have."""
    if most == 0:
        return
    decoder = CachedDecoder(model.transformer, batch.max_seqlen + most - 1)
    state = decoder.read(batch.pack(input_ids), batch)
    stops = torch.tensor(ends.tokens, dtype=torch.int64, device=input_ids.device)
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    for number in range(1, most + 1):
        going = ~ended
        token = choice.choose(model.lm_head(state))
        if ends.tokens:
            token = token.where(going, ends.padding)
            ended = ended | torch.isin(token, stops)
        yield token, going
        if number == most or (ends.tokens and number % looks == 0 and bool(ended.all())):
            return
        state = decoder.step(token)


class _Ends(NamedTuple):
    """The tokens that end a sequence, and the one after the end."""

    tokens: list[int]
    padding: int

    @staticmethod
    def of(config: Any, eos_token_id: int | Sequence[int] | None, pad_token_id: int | None) -> _Ends:
        given = config.eos_token_id if eos_token_id is None else eos_token_id
        ends = [] if given is None else [given] if isinstance(given, int) else list(given)
        padding = config.pad_token_id if pad_token_id is None else pad_token_id
        return _Ends(ends, padding if padding is not None else ends[0] if ends else 0)


def _check(model: CausalModel, batch: PackedBatch, new: int) -> None:
    if model.training:
        raise ValueError(f"{_NAME}: model: expected evaluation mode (model.eval()), got training mode")
    if new < 0:
        raise ValueError(f"{_NAME}: max_new_tokens: expected at least 0, got {new}")
    if batch.cu_seqlens.shape[0] > 1 and bool((batch.cu_seqlens.diff() < 1).any()):
        raise ValueError(f"{_NAME}: input_ids: expected prompts of at least one token, got an empty one")
    positions = model.config.n_positions
    if batch.max_seqlen + new > positions:
        got = f"{new} after {batch.max_seqlen}"
        raise ValueError(
            f"{_NAME}: max_new_tokens: expected no more than {positions} tokens with the prompt, got {got}"
        )
