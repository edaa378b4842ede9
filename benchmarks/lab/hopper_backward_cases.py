"""Problems of the scripts about the Hopper backward of attention."""

from __future__ import annotations

import itertools
from typing import Any

ODD = (64, 1, 0, 65, 512, 127, 128, 129, 0, 320, 33, 192, 193, 511, 500)
# Of a case: dense (B, S) or packed (lengths); heads; causal; p; lengths; fused: slices of one qkv; half: fp16.
COMMON: dict[str, dict[str, Any]] = {  # for every head dim
    "64": {"dense": (2, 64), "heads": 2},
    "128": {"dense": (2, 128), "heads": 3},
    "64_p": {"dense": (2, 64), "heads": 2, "p": 0.1},
    "512": {"dense": (3, 512), "heads": 2},
    "512_p": {"dense": (3, 512), "heads": 2, "p": 0.1, "fused": True},
    "200": {"dense": (2, 200), "heads": 2},
    "lengths": {"dense": (6, 330), "lengths": (5, 0, 37, 330, 128, 192), "heads": 2, "p": 0.1},
    "packed": {"packed": (5, 0, 37, 130, 512, 64, 1, 300), "heads": 3, "p": 0.1, "fused": True},
    "many": {"dense": (40, 192), "heads": 16, "p": 0.1},
    "causal": {"dense": (2, 512), "heads": 2, "causal": True},
    "causal_p": {"packed": (5, 0, 37, 130, 500, 64, 1, 300), "heads": 3, "p": 0.1, "causal": True},
    "cross": {"packed": (5, 0, 37, 130, 500, 64), "packed_k": (50, 7, 30, 0, 256, 130), "heads": 2, "causal": True},
    "cross_p": {"packed": (5, 0, 37, 130, 500, 64), "packed_k": (50, 7, 30, 0, 256, 130), "heads": 2, "p": 0.5},
    "odd": {"packed": ODD, "heads": 16, "fused": True},  # more heads than blocks
    "odd_p": {"packed": ODD, "heads": 16, "p": 0.1},
    "odd_causal": {"packed": ODD, "heads": 16, "causal": True},
    "odd_lengths": {"dense": (len(ODD), 512), "lengths": ODD, "heads": 16},
    "half": {"dense": (2, 256), "heads": 2, "p": 0.1, "half": True},
    "all_dropped": {"dense": (2, 128), "heads": 2, "p": 1.0},
    "2000_p": {"dense": (1, 2000), "heads": 2, "p": 0.1},
    "long_packed": {"packed": (700, 64, 1500, 3), "heads": 2, "p": 0.1, "fused": True},
    "long_cross": {"packed": (700, 64), "packed_k": (300, 1000), "heads": 2, "causal": True},
}
CHECKS: dict[str, dict[str, Any]] = {
    **COMMON,
    "1024": {"dense": (2, 1024), "heads": 2},
    "long_causal": {"dense": (1, 2000), "heads": 2, "causal": True},
    "4096": {"dense": (1, 4096), "heads": 2},
    "5000_causal": {"dense": (1, 5000), "heads": 1, "causal": True},
    "mixed": {"packed": (6000, 5, 64, 0, 1000, 130), "heads": 1, "p": 0.1, "fused": True},
    "4096_causal_p": {"dense": (1, 4096), "heads": 2, "causal": True, "p": 0.1},
}
# With so many blocks for a head.
SHARED = {
    f"{name}/{blocks}": {**CHECKS[name], "blocks": blocks}
    for blocks, names in {
        1: ("long_packed", "long_causal", "4096"),
        2: ("64", "512_p", "lengths", "packed", "causal_p", "cross", "cross_p", "long_cross"),
        4: ("512", "packed", "causal", "cross", "2000_p", "long_packed", "long_causal"),
        8: ("200", "1024", "lengths", "causal_p", "long_cross", "long_causal"),
    }.items()
    for name in names
}
CHECKS |= SHARED
RACES = ("lengths", "64_p", "causal", "causal_p/2", "512/4", "long_cross/8")  # a call of each kernel, or nearly

STRESS: dict[str, dict[str, Any]] = {
    "64x512_p": {"dense": (64, 512), "heads": 16, "p": 0.1, "fused": True},
    "128x128_p": {"dense": (128, 128), "heads": 16, "p": 0.1},
    "40x192_p": {"dense": (40, 192), "heads": 16, "p": 0.1},
    "32x512_causal": {"dense": (32, 512), "heads": 16, "causal": True},
    "packed_p": {"packed": tuple(1 + 511 * i // 99 for i in range(100)), "heads": 16, "p": 0.1},
    "16x1024_p": {"dense": (16, 1024), "heads": 16, "p": 0.1},
    "16x1024_p/1": {"dense": (16, 1024), "heads": 16, "p": 0.1, "blocks": 1},
    "16x1024/8": {"dense": (16, 1024), "heads": 16, "blocks": 8},
    "8x2000_causal_p": {"dense": (8, 2000), "heads": 16, "p": 0.1, "causal": True},
    "8x2000_causal/2": {"dense": (8, 2000), "heads": 16, "causal": True, "blocks": 2},
    "2x8192": {"dense": (2, 8192), "heads": 16},
    "long_cross": {"packed": (700, 64) * 8, "packed_k": (300, 1000) * 8, "heads": 16, "causal": True},
    "long_cross/4": {"packed": (700, 64) * 8, "packed_k": (300, 1000) * 8, "heads": 16, "causal": True, "blocks": 4},
    "short_cross/8": {"packed": (64,) * 16, "packed_k": (1000,) * 16, "heads": 16, "causal": True, "blocks": 8},
}

TIMES: dict[str, dict[str, Any]] = {
    f"{batch}x{size}{'_causal' if causal else ''}{'_p' if p else ''}": {
        "dense": (batch, size),
        "heads": 16,
        "p": p,
        "causal": causal,
        "fused": True,
    }
    for batch, size, causal, p in (
        (32, 512, False, 0.1),
        (32, 512, False, 0.0),
        (8, 2048, False, 0.0),
        (4, 4096, False, 0.0),
        (16, 1024, False, 0.0),
        (32, 512, True, 0.0),
        (1, 16384, False, 0.0),
        (1, 16384, True, 0.0),
        (2, 8192, False, 0.0),
        (16, 1024, True, 0.0),
        (8, 2048, True, 0.0),
        (4, 4096, True, 0.0),
        (2, 8192, True, 0.0),
        (64, 256, False, 0.1),
        (16, 1024, False, 0.1),
        (8, 2048, False, 0.1),
        (4, 4096, False, 0.1),
        (2, 8192, False, 0.1),
        (64, 512, False, 0.1),
        (128, 128, False, 0.0),
        (128, 128, False, 0.1),
        (8, 512, False, 0.1),
    )
}
TIMES["packed_p"] = {"packed": tuple(64 + 448 * i // 63 for i in range(64)), "heads": 16, "p": 0.1, "fused": True}


def make(case: dict[str, Any], dirty: bool = True, head_dim: int = 64) -> tuple[Any, ...]:
    import torch

    from fasttfm.kernels.attention.problem import AttentionProblem
    from fasttfm.kernels.common import philox

    dtype = torch.float16 if case.get("half") else torch.bfloat16
    heads, p = case["heads"], case.get("p", 0.0)
    threshold = philox.threshold(p)
    limits = {"scale": head_dim**-0.5, "window_right": 0 if case.get("causal") else -1, "threshold": threshold}
    limits |= {"dropout_scale": philox.scale(threshold)}
    if p:
        limits["seed"] = torch.tensor([0x1234_5678_9ABC_DEF], device="cuda")

    def ints(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    spare = 3 if dirty else 0  # rows that are no sequence's
    shape: tuple[int, ...]
    shape_k: tuple[int, ...]
    if "dense" in case:
        batch, size = case["dense"]
        shape = shape_k = (batch, size, heads, head_dim)
        lengths = ints(case["lengths"]) if "lengths" in case else None
        problem = AttentionProblem(batch, size, size, lengths=lengths, lengths_k=lengths, **limits)
    else:
        own, own_k = case["packed"], case.get("packed_k", case["packed"])
        cu, cu_k = (ints([0, *itertools.accumulate(x)]) for x in (own, own_k))
        shape, shape_k = (sum(own) + spare, heads, head_dim), (sum(own_k) + spare, heads, head_dim)
        problem = AttentionProblem(len(own), max(own), max(own_k), cu_seqlens=cu, cu_seqlens_k=cu_k, **limits)
    if case.get("fused"):
        fused = (*shape[:-2], 3, heads, head_dim)
        q, k, v = torch.randn(fused, device="cuda", dtype=dtype).unbind(-3)
        dq, dk, dv = torch.full(fused, torch.nan, device="cuda", dtype=dtype).unbind(-3)
    else:
        q, k, v = (torch.randn(s, device="cuda", dtype=dtype) for s in (shape, shape_k, shape_k))
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    dout = torch.randn(shape, device="cuda", dtype=dtype)
    if dirty and problem.packed:
        for x in (q, k, v, dout):
            x[-spare:] = torch.nan
    if dirty and problem.lengths is not None:
        absent = torch.arange(size, device="cuda") >= problem.lengths[:, None]
        for x in (q, k, v, dout):
            x[absent] = torch.nan
    return problem, q, k, v, dout, dq, dk, dv
