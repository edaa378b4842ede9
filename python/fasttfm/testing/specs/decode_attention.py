"""decode_attention: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer
from fasttfm.kernels.decode_attention import reference
from fasttfm.ops import decode_attention
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, TritonKernel, draw, spoil


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    sizes = case.sizes
    lengths, room, heads, groups, width = (sizes[name] for name in ("lengths", "room", "heads", "key_heads", "width"))
    batch = len(lengths)

    def tensor(*shape: int) -> Tensor:
        return draw(generator, *shape, dtype=dtype, device=device)

    caches = [tensor(batch, groups, room, width).transpose(1, 2) for _ in range(2)]
    if sizes.get("tokens_first"):
        caches = [cache.contiguous() for cache in caches]
    qkv = tensor(batch, heads + 2 * groups, width)
    q, k, v = qkv.split((heads, groups, groups), 1)  # strided, as a fused projection gives them
    if batch == 0:  # opcheck cannot copy empty views
        q, k, v, *caches = (torch.empty(tensor.shape, dtype=dtype, device=device) for tensor in (q, k, v, *caches))
    return {
        "q": q,
        "k": k,
        "v": v,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
    }


def _case(
    name: str,
    lengths: tuple[int, ...],
    room: int,
    *,
    heads: int = 2,
    key_heads: int = 2,
    width: int = 16,
    window: int | None = None,
    scale: float | None = None,
    **sizes: Any,
) -> OpCase:
    all_sizes = {"lengths": lengths, "room": room, "heads": heads, "key_heads": key_heads, "width": width, **sizes}
    return OpCase(name, all_sizes, {"window": window, "scale": scale})


CASES = (
    _case("typical", (9, 0, 7, 12), 13),
    _case("splits", (10, 299, 128, 127), 300),
    _case("window", (40, 3, 280), 290, window=130),
    _case("own_token", (5, 0), 8, window=0),
    _case("grouped", (9, 150), 160, heads=6, key_heads=2, width=24, scale=0.3),
    _case("tokens_first", (3, 9), 10, tokens_first=True, width=20),
    _case("full", (6, 9), 6),  # lengths outside count as the nearest inside
    _case("no_sequences", (), 4, heads=1, key_heads=1),
)


def _random_case(source: random.Random) -> OpCase:
    room = source.choice((1, 5, 40, 140))
    key_heads = source.choice((1, 2, 3))
    return _case(
        "random",
        tuple(source.randrange(room) for _ in range(source.choice((1, 2, 5)))),
        room,
        heads=key_heads * source.choice((1, 1, 2, 4)),
        key_heads=key_heads,
        width=source.choice((8, 32, 48, 64)),
        window=source.choice((None, None, 0, 7, 60)),
        tokens_first=source.random() < 0.5,
    )


def _cost(case: OpCase, dtype: torch.dtype) -> Cost:
    sizes, window = case.sizes, case.options["window"]
    tokens = sum(min(length, sizes["room"] if window is None else window) + 1 for length in sizes["lengths"])
    return Cost(bytes=2 * tokens * sizes["key_heads"] * sizes["width"] * dtype.itemsize)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    window: int | None,
    scale: float | None,
) -> Tensor:
    left, factor = -1 if window is None else window, q.shape[2] ** -0.5 if scale is None else scale
    return reference.decode_attention(q, k, v, key_cache, value_cache, lengths, left, factor)


def _sdpa(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """torch's attention over the whole room with a mask, as transformers' static caches use it; nothing is written."""
    q, keys, values, lengths = (inputs[name] for name in ("q", "key_cache", "value_cache", "lengths"))
    mask = (torch.arange(keys.shape[1], device=q.device) <= lengths[:, None])[:, None, None]
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], k, v, attn_mask=mask, enable_gqa=grouped
    )


BAD_CALLS = (
    BadCall("q is no tensor", "q", TypeError, spoil("q", [1.0])),
    BadCall("q of two dimensions", "q", ValueError, spoil("q", torch.ones(4, 16))),
    BadCall("k of other heads", "k", ValueError, spoil("k", torch.ones(4, 1, 16))),
    BadCall("v in another type", "v", TypeError, spoil("v", torch.ones(4, 2, 16, dtype=torch.float64))),
    BadCall("a cache of another batch", "key_cache", ValueError, spoil("key_cache", torch.ones(3, 13, 2, 16))),
    BadCall("heads that do not divide", "key_cache", ValueError, spoil("key_cache", torch.ones(4, 13, 3, 16))),
    BadCall("caches that differ", "value_cache", ValueError, spoil("value_cache", torch.ones(4, 12, 2, 16))),
    BadCall("lengths in int64", "lengths", TypeError, spoil("lengths", torch.ones(4, dtype=torch.int64))),
    BadCall("lengths of another batch", "lengths", ValueError, spoil("lengths", torch.ones(3, dtype=torch.int32))),
    BadCall("lengths elsewhere", "lengths", ValueError, spoil("lengths", torch.ones(4, device="meta").int())),
    BadCall("arrived too short", "arrived", ValueError, spoil("arrived", torch.zeros(4, 1, dtype=torch.int32))),
    BadCall("window is negative", "window", ValueError, spoil("window", -1)),
    BadCall("window is text", "window", TypeError, spoil("window", "all")),
    BadCall("scale is text", "scale", TypeError, spoil("scale", "small")),
    BadCall("q wants a gradient", "q", ValueError, spoil("q", torch.ones(4, 2, 16, requires_grad=True))),
)


def _without_the_new_token(**arguments: Any) -> Tensor:
    return _reference(**{**arguments, "v": torch.zeros_like(arguments["v"])})


def _one_too_many(**arguments: Any) -> Tensor:
    lengths, room = arguments["lengths"], arguments["key_cache"].shape[1]
    return _reference(**{**arguments, "lengths": (lengths + 1).clamp(max=room - 1)})


def _wider_window(**arguments: Any) -> Tensor:
    window = arguments["window"]
    return _reference(**{**arguments, "window": None if window is None else window + 1})


def _other_groups(**arguments: Any) -> Tensor:
    """Query heads of a key head at a stride instead of next to each other."""
    q, group = arguments["q"], arguments["key_cache"].shape[2]
    order = torch.arange(q.shape[1], device=q.device).view(-1, group).t().flatten()
    out = torch.empty_like(q)
    out[:, order] = _reference(**{**arguments, "q": q[:, order]})
    return out


def _triton_kernels() -> list[TritonKernel]:
    from fasttfm.kernels.decode_attention import triton as kernels

    signatures = []
    for width in (32, 64, 128):
        for batch, group in ((1, 1), (128, 1), (1, 4)):
            signatures += kernels.compile_signatures(batch, group, width, "bf16")
    signatures += kernels.compile_signatures(1, 1, 64, "fp32")
    signatures += kernels.compile_signatures(1, 1, 64, "bf16", dependent=True)
    return [TritonKernel(**description) for description in signatures]


def _bench(batch: int, tokens: int, room: int, width: int = 64) -> OpCase:
    heads = 768 // width
    name = f"B{batch} {tokens} of {room} D{width}"
    return _case(name, (tokens,) * batch, room, heads=heads, key_heads=heads, width=width)


SPEC = OpSpec(
    name="decode_attention",
    function=decode_attention,
    reference=_reference,
    inputs=_inputs,
    differentiable=(),
    cases=CASES,
    random_case=_random_case,
    bench_cases=(_bench(1, 192, 256), _bench(16, 192, 256), _bench(128, 192, 256), _bench(16, 1000, 1024, 128)),
    bench_cases_cpu=(_bench(1, 192, 256), _bench(8, 192, 256)),
    forward_cost=_cost,
    torch_products=True,
    peers=(Peer("torch", _sdpa),),
    bad_calls=BAD_CALLS,
    mutants={
        "without the new token's value": _without_the_new_token,
        "one token too many": _one_too_many,
        "a wider window": _wider_window,
        "other groups of heads": _other_groups,
    },
    triton_kernels=_triton_kernels,
)
