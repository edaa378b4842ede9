"""``generate`` and ``stream``: continue prompts token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fasttfm.generate.beams import BeamSearch, search_beams
from fasttfm.generate.decoder import body_of
from fasttfm.generate.sampling import Sampling, check_new_tokens, end_tokens
from fasttfm.generate.session import Generation, GenerationSession
from fasttfm.models.families import longest_input
from fasttfm.nn import CausalLMHead, PackedBatch
from fasttfm.nn.plain import Uncopied

_NAME = "generate"
_SESSION_ATTRIBUTE = "_generation"  # the attribute of a model that holds its session
_LENGTH_MULTIPLE = 128


class CausalModel(Protocol):
    """A causal LM: GPT2LMHeadModel and its variants, LlamaForCausalLM, Qwen3ForCausalLM."""

    config: Any
    training: bool
    lm_head: CausalLMHead


def generate(
    model: CausalModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    num_beams: int = 1,
    num_return_sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    **sampling: Any,
) -> Tensor:
    """Continues the prompts ``input_ids`` [B, S], each until it ends or has ``max_new_tokens`` new tokens.

    Prompts are read once, without padding; then each step computes one token of every sequence.

    Args:
        model: In evaluation mode.
        attention_mask: ``[B, S]``, nonzero for tokens and 0 for padding, which may be anywhere. Positions count only
            the tokens of a prompt.
        lengths: The number of tokens of each prompt, instead of a mask, for padding at the end.
        max_new_tokens: The maximum number of new tokens.
        eos_token_id: One or several tokens, each of which ends a sequence; the configuration's by default, none for [].
        pad_token_id: The token that follows the end of a sequence while others continue; by default the
            configuration's, or else the first ``eos_token_id``.
        num_beams: Above 1, beam search with this many beams.
        num_return_sequences: How many continuations of each prompt beam search returns, the best first.
        length_penalty: Beam search compares continuations by log-probability / length^length_penalty.
        early_stopping: See ``BeamSearch``.
        sampling: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``generator``: see ``Sampling``.

    Returns:
        ``[B * num_return_sequences, S + new]``: ``input_ids``, then the new tokens, up to the end of the longest.
    """
    ends = _StopTokens.of(model.config, eos_token_id, pad_token_id)
    batch = PackedBatch.of(input_ids, attention_mask, lengths=lengths)
    _check(model, batch, max_new_tokens)
    choice = Sampling(**sampling)
    search = BeamSearch(num_beams, num_return_sequences, length_penalty, early_stopping)
    if num_beams > 1:
        if choice.do_sample:
            raise ValueError(f"{_NAME}: do_sample: expected False with several beams, got True")
        return _run_beam_search(model, input_ids, batch, max_new_tokens, ends, search)
    return _run_session(model, input_ids, batch, max_new_tokens, ends, choice)


def stream(
    model: CausalModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | None = None,
    **sampling: Any,
) -> Iterator[int]:
    """Continues one prompt ``input_ids`` [S] or [1, S] and yields each token as soon as it is computed. The tokens are
    those of ``generate`` with the same arguments, including the one that ends the sequence."""
    prompt = input_ids[None] if input_ids.dim() == 1 else input_ids
    if prompt.dim() != 2 or len(prompt) != 1:
        expected = "one prompt, of shape [S] or [1, S]"
        raise ValueError(f"{_NAME}: input_ids: expected {expected}, got shape {tuple(input_ids.shape)}")
    ends = _StopTokens.of(model.config, eos_token_id, None)
    batch = PackedBatch.of(prompt)
    _check(model, batch, max_new_tokens)
    session = session_of(model, 1, batch.max_seqlen + max_new_tokens)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": ends.tokens}
    return _iterate(session.submit(prompt[0], **options, sampling=Sampling(**sampling)))


def _iterate(sequence: Generation) -> Iterator[int]:
    """Yields the tokens; cancels the sequence if the caller does not read it to its end."""
    try:
        yield from sequence
    finally:
        sequence.cancel()


def _run_session(
    model: CausalModel, input_ids: Tensor, batch: PackedBatch, new: int, ends: _StopTokens, choice: Sampling
) -> Tensor:
    """Continues each prompt as a sequence of a session, and pads the results to one tensor."""
    if new == 0 or len(input_ids) == 0:
        return input_ids
    session = session_of(model, len(input_ids), batch.max_seqlen + new)
    prompts = batch.pack(input_ids).split(batch.cu_seqlens.diff().tolist())
    options: dict[str, Any] = {"max_new_tokens": new, "eos_token_id": ends.tokens, "sampling": choice}
    sequences = [session.submit(prompt, **options) for prompt in prompts]
    try:
        continuations = [sequence.result() for sequence in sequences]
    finally:
        for sequence in sequences:
            sequence.cancel()
    width = max(map(len, continuations))
    padded = [[*tokens, *[ends.padding] * (width - len(tokens))] for tokens in continuations]
    tokens = torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat([input_ids, tokens], 1)


class _SessionHolder(Uncopied):
    """Holds the session of a model on a GPU between calls; copies of the model do not get it."""

    def __init__(self, session: GenerationSession) -> None:
        self.session = session


def release(model: Any) -> None:
    """Frees the cache and the CUDA graphs that ``generate`` and ``stream`` keep with a model on a GPU."""
    model.__dict__.pop(_SESSION_ATTRIBUTE, None)


def session_of(model: Any, sequences: int, tokens: int) -> GenerationSession:
    """A session for this many sequences of this many tokens. On a GPU the model keeps it, because capturing its graphs
    takes longer than a short call; its sizes are rounded up so that similar calls can use it too."""
    parameter = next(body_of(model).parameters())
    if not parameter.is_cuda or torch.is_autocast_enabled("cuda"):
        return GenerationSession(model, max_batch=sequences, max_length=tokens, graphs=False)
    holder: _SessionHolder | None = model.__dict__.get(_SESSION_ATTRIBUTE)
    if holder is not None and holder.session.fits(sequences, tokens):
        return holder.session
    release(model)
    batch = 1 << (sequences - 1).bit_length()
    capacity = min(longest_input(model.config), -(-tokens // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE)
    session = GenerationSession(model, max_batch=batch, max_length=capacity)
    model.__dict__[_SESSION_ATTRIBUTE] = _SessionHolder(session)
    return session


def _run_beam_search(
    model: CausalModel, input_ids: Tensor, batch: PackedBatch, new: int, ends: _StopTokens, search: BeamSearch
) -> Tensor:
    """Continues each prompt by its best sequences of a beam search."""
    prompts = input_ids.repeat_interleave(search.num_return_sequences, 0)
    if new == 0 or len(input_ids) == 0:
        return prompts
    tokens = search_beams(model, batch.pack(input_ids), batch, new, ends.tokens, search)
    tokens = tokens.masked_fill(tokens < 0, ends.padding).to(input_ids.dtype)
    return torch.cat([prompts, tokens], 1)


class _StopTokens(NamedTuple):
    """The tokens that end a sequence, and the one that pads it after its end."""

    tokens: list[int]
    padding: int

    @staticmethod
    def of(config: Any, eos_token_id: int | Sequence[int] | None, pad_token_id: int | None) -> _StopTokens:
        ends = end_tokens(config, eos_token_id)
        padding = config.pad_token_id if pad_token_id is None else pad_token_id
        return _StopTokens(ends, padding if padding is not None else ends[0] if ends else 0)


def _check(model: CausalModel, batch: PackedBatch, new: int) -> None:
    if model.training:
        raise ValueError(f"{_NAME}: model: expected evaluation mode (model.eval()), got training mode")
    check_new_tokens(new)
    if batch.cu_seqlens.shape[0] > 1 and bool((batch.cu_seqlens.diff() < 1).any()):
        raise ValueError(f"{_NAME}: input_ids: expected prompts of at least one token, got an empty one")
    positions = longest_input(model.config)
    if batch.max_seqlen + new > positions:
        got = f"{new} after {batch.max_seqlen}"
        raise ValueError(
            f"{_NAME}: max_new_tokens: expected no more than {positions} tokens with the prompt, got {got}"
        )
