"""Tokens drawn from logits, in plain torch: the specification.

For a row of logits x [V] with temperature t, k = top_k and p = top_p:

    t = 0: the first token of the largest logit
    z = x / t
    1. only tokens with z at least the k-th largest are kept (k = 0: all)
    2. of these only tokens for which the total probability of the kept tokens with a larger z is below p (p = 1: all)
    3. the first token at which the running sum of exp(z - max), over kept tokens in the order of their ids, exceeds u
       times the total

u in (0, 1) depends only on the row's seed and the token's position: 23 bits of the first word of

    philox(key=seed, counter=(position, 0, 0, 2^32 - 2))

so that a sequence's tokens do not depend on the batch it is in. Arithmetic is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common import philox

COUNTER = 0xFFFFFFFE  # the fourth word of the Philox counter, which neither dropout nor the losses use


def sample_tokens(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """int64 [B] for logits [B, V], int64 seeds [B], integer positions [B], and fp32, int32, fp32 [B]."""
    return drawn(logits, kept_logits(logits, temperature, top_k, top_p), seeds, positions, temperature)


def advance(
    tokens: Tensor, positions: Tensor, ids: Tensor, active: Tensor, limits: Tensor, ends: Tensor, history: Tensor
) -> None:
    """Appends its token to each active sequence, in ``ids`` and in ``history``, and makes the sequence inactive if the
    token is one of its ``ends`` (-1 for none) or if it then has ``limits`` tokens."""
    ids.copy_(torch.where(active, tokens, ids))
    history.scatter_(1, positions.long()[:, None], ids[:, None])
    active &= (ids[:, None] != ends).all(1) & (positions + 1 < limits)


def drawn(logits: Tensor, kept: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor) -> Tensor:
    """Draws the tokens from the ``kept`` logits; greedy rows take the largest of ``logits``."""
    running = (kept - kept.amax(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    target = uniform(seeds, positions)[:, None] * running[:, -1:]
    tokens = (~(running > target)).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
    return torch.where(temperature > 0, tokens, logits.argmax(dim=-1))


def kept_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """z [B, V] in fp32, -inf for tokens that are not kept."""
    z = scaled(logits, temperature)
    ordered = z.sort(dim=-1, descending=True).values
    count = z.shape[-1]
    last = torch.where((top_k > 0) & (top_k < count), top_k, count).long() - 1
    z = z.masked_fill(z < ordered.gather(1, last[:, None]), float("-inf"))
    # The smallest z that is kept: the last in the order with a total probability below p before it. Ties are all kept.
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last[:, None]), float("-inf"))
    weights = (ordered - ordered[:, :1]).exp()
    before = weights.cumsum(dim=-1) - weights
    enough = before < top_p[:, None] * weights.sum(dim=-1, keepdim=True)
    bound = ordered.gather(1, (enough.sum(dim=-1, keepdim=True) - 1).clamp(min=0))
    limited = (top_p < 1)[:, None]
    return z.masked_fill(limited & (z < bound), float("-inf"))


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """z [B, V] in fp32 of all tokens."""
    return logits.float() / temperature.where(temperature > 0, 1.0)[:, None]


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """A random number in (0, 1) for each row: fp32 [B]."""
    zero = torch.zeros_like(seeds)
    word, *_ = philox.philox(seeds, positions.long() & 0xFFFFFFFF, zero, zero, zero + COUNTER)
    return ((word >> 9).float() + 0.5) * 2.0**-23
