"""Random cases of attention, every layout with the options that it supports; and the terms of gradients that cancel."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

from torch import Tensor

from fasttfm.kernels.attention import reference
from fasttfm.testing.random_sizes import random_lengths, random_size

_ONE_LENGTH = ("dense", "transposed", "fused")  # all sequences are of one length
_ONE_QKV = ("sliced", "fused", "fused packed")  # keys and queries have the same lengths and numbers of heads
_PACKED = ("packed", "sliced", "fused packed")
_BIASES = ("full", "of all", "of sequences", "of each")


def random_arguments(source: random.Random) -> dict[str, Any]:
    """The parameters of a random case: lengths, heads, head_dim, layout and options."""
    layout = source.choice(("dense", "padded", "packed", "packed", "transposed", "sliced", "fused", "fused packed"))
    lengths = random_lengths(source, longest=source.choice((12, 40, 150)))
    lengths_k = tuple(random_size(source, 40) if source.random() < 0.8 else 0 for _ in lengths)
    if layout in _ONE_LENGTH:
        lengths, lengths_k = lengths[:1] * len(lengths), lengths_k[:1] * len(lengths)
    if layout in _ONE_QKV or source.random() < 0.5:
        lengths_k = lengths
    kv_heads = source.randint(1, 3)
    groups = 1 if layout in _ONE_QKV else source.choice((1, 1, 2, 3))
    arguments: dict[str, Any] = {
        "lengths": lengths,
        "lengths_k": lengths_k,
        "heads": groups * kv_heads,
        "kv_heads": kv_heads,
        "head_dim": source.choice((8, 16, 24, 32, 40, 64, 72, 128, random_size(source, 80))),
        "layout": layout,
        "dropout_p": source.choice((0.0, 0.0, 0.1, 0.5)),
        "causal": source.random() < 0.4,
        "return_lse": source.random() < 0.3,
        "interpret": max((*lengths, *lengths_k)) < 45,
    }
    bias = source.choice(("", "", "", "full", "alibi"))
    longest = max((*lengths, *lengths_k))
    if layout in _PACKED and (bias == "full" or source.random() < 0.5):
        arguments["max_seqlen"] = longest
    if max(lengths) and max(lengths_k) and not (layout in _PACKED and lengths != lengths_k):
        # Derived from the sizes: another draw would change all later cases.
        arguments["bias"] = _BIASES[(len(lengths) + kv_heads) % len(_BIASES)] if bias == "full" else bias
    if source.random() < 0.25:
        arguments["window"] = (source.choice((None, 0, 3, 20)), source.choice((None, 0, 5)))
    if source.random() < 0.2:
        arguments["scale"] = source.choice((0.1, 1.0))
    return arguments


def without_delta(*args: Tensor, **options: Any) -> Any:
    """Attention with the softmax's sum as a constant: ds is P * dP. With delta, ds cancels to 0 for a query with one
    key."""
    softmax = reference._softmax

    def constant_sum(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        weights, total, lse = softmax(*arguments)
        return weights, total.detach(), lse

    with mock.patch.object(reference, "_softmax", constant_sum):
        return reference.attention(*args, **options)
