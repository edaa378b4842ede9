"""``sample_tokens``: the next token of each sequence from its logits, greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.kernels.sample_tokens import reference
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import checked
from fasttfm.ops.core.backends import (
    Backend,
    always,
    dtype_name,
    from_triton,
    refuse_native_cpu,
    refuse_triton,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.core.declare import ForwardOp

NAME = "sample_tokens"


class Sequences(NamedTuple):
    """The state of sequences that are decoded together, changed in place. Each active sequence gets its token, and
    becomes inactive if that is one of its ``ends`` or if it then has ``limits`` tokens."""

    ids: Tensor  # int64 [B]: the last token, unchanged for inactive sequences
    active: Tensor  # bool [B]
    limits: Tensor  # int32 [B]: the maximum length of the sequence, prompt included
    ends: Tensor  # int64 [B, a power of two], padded with -1
    history: Tensor  # int64 [B, room]: each token at its position


def sample_tokens(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    sequences: Sequences | None = None,
    backend: str | None = None,
) -> Tensor:
    """Returns a token for each row of logits. A drawn token depends only on the row's own logits, seed and position, so
    a sequence gets the same tokens in every batch. Does not synchronize with the GPU.

    Args:
        logits: ``[B, V]``, fp32, bf16 or fp16 (fp64 on the reference backend).
        seeds: int64 ``[B]``.
        positions: int32 or int64 ``[B]``: the token's position in its sequence.
        temperature: fp32 ``[B]``, divides the logits; 0 takes the most likely token.
        top_k: int32 ``[B]``: only the k most likely tokens are kept; 0 keeps all.
        top_p: fp32 ``[B]``: of these, the most likely ones up to this total probability; 1 keeps all.
        sequences: The state of the sequences, to which the tokens are appended in place.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        int64 ``[B]``.
    """
    checks.check_floating(NAME, "logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise checks.bad_value(NAME, "logits", "shape (B, V)", f"shape {tuple(logits.shape)}")
    floats, integers = (torch.float32,), (torch.int32,)
    for name, tensor, types in (
        ("seeds", seeds, (torch.int64,)),
        ("positions", positions, checks.INDEX),
        ("temperature", temperature, floats),
        ("top_k", top_k, integers),
        ("top_p", top_p, floats),
    ):
        expected = " or ".join(dtype_name(dtype) for dtype in types)
        if not isinstance(tensor, Tensor):
            raise checks.bad_type(NAME, name, f"a tensor of {expected}", type(tensor).__name__)
        if tensor.dtype not in types:
            raise checks.bad_type(NAME, name, f"a tensor of {expected}", dtype_name(tensor.dtype))
        checks.check_shape(NAME, name, tensor, logits.shape[:1])
        checks.check_device(NAME, name, tensor, like=logits)
    if sequences is not None:
        _check_sequences(sequences, logits)
    tensors = (logits.detach(), seeds, positions, temperature, top_k, top_p)
    return OP(*tensors, *(sequences or _NO_SEQUENCES), backend=backend)


_NO_SEQUENCES = (None,) * len(Sequences._fields)
_SEQUENCE_TYPES = (torch.int64, torch.bool, torch.int32, torch.int64, torch.int64)


def _check_sequences(sequences: Any, logits: Tensor) -> None:
    if not isinstance(sequences, Sequences):
        raise checks.bad_type(NAME, "sequences", "Sequences or None", type(sequences).__name__)
    rows = logits.shape[0]
    for name, tensor, dtype in zip(sequences._fields, sequences, _SEQUENCE_TYPES, strict=True):
        argument = f"sequences.{name}"
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            got = dtype_name(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise checks.bad_type(NAME, argument, f"a tensor of {dtype_name(dtype)}", got)
        table = name in ("ends", "history")
        if tensor.dim() != 1 + table or tensor.shape[0] != rows or tensor.stride(-1) != 1:
            expected = f"({rows}, any)" if table else f"({rows},)"
            raise checks.bad_value(NAME, argument, f"shape {expected} with contiguous rows", tensor.shape)
        checks.check_device(NAME, argument, tensor, like=logits)
    count = sequences.ends.shape[1]
    if count < 1 or count & (count - 1) or not sequences.ends.is_contiguous():
        raise checks.bad_value(NAME, "sequences.ends", "a contiguous table of 1, 2, 4, ... columns", f"{count} columns")


# ---- backends --------------------------------------------------------------------------------------------------------


def _then_advance(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward that calls ``draw`` and then appends its tokens to the sequences."""

    def forward(logits: Tensor, *passed: Any) -> Tensor:
        sampling, sequences = passed[:5], passed[5:]
        tokens = draw(logits, *sampling)
        if sequences[0] is not None:
            reference.advance(tokens, sampling[1], *sequences)
        return tokens

    return forward


def _forward_cpu(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """The reference without the sort if no row has top_k or top_p, and without random numbers if all are
    greedy."""
    drawn = temperature > 0
    if not bool(drawn.any()):
        return logits.argmax(dim=-1)
    limited = drawn & ((top_k > 0) | (top_p < 1))
    if bool(limited.any()):
        kept = reference.kept_logits(logits, temperature, top_k, top_p)
    else:
        kept = reference.scaled(logits, temperature)
    return reference.drawn(logits, kept, seeds, positions, temperature)


OP = ForwardOp(
    NAME,
    inputs=(
        *(checked(name) for name in ("logits", "seeds", "positions", "temperature", "top_k", "top_p")),
        *(checked("ids", optional=True, changed="a"), checked("active", optional=True, changed="b")),
        *(checked("limits", optional=True), checked("ends", optional=True)),
        checked("history", optional=True, changed="c"),
    ),
    output=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64),
    backends=(
        Backend("cpu", always, refuse_native_cpu, _then_advance(_forward_cpu)),
        Backend("triton", triton_absent, refuse_triton, from_triton(NAME, "sample_tokens_triton")),
        torch_reference(_then_advance(reference.sample_tokens)),
    ),
)
