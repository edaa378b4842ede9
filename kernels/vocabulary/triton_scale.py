"""A tensor times a scalar tensor on the device, rounded once to another type, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import cdiv, on_device
from fasttfm.kernels.common.triton.launcher import launched_kernel

_BLOCK = 4096


@launched_kernel
@triton.jit
def _scale_kernel(x, scale, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale).to(tl.float32)
    value = tl.load(x + at, mask=at < n, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out + at, (value * factor).to(out.dtype.element_ty), mask=at < n)


def scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = x * factor; both contiguous and of one shape, factor of one element."""
    if x.numel() == 0:
        return
    with on_device(x):
        _scale_kernel[(cdiv(x.numel(), _BLOCK),)](x, factor, out, x.numel(), BLOCK=_BLOCK, num_warps=8)


def compile_signatures(source: str, target: str) -> list[dict[str, object]]:
    signature = {"x": f"*{source}", "scale": "*fp32", "out": f"*{target}", "n": "i64"}
    return [{"kernel": _scale_kernel, "signature": signature, "num_warps": 8, "constants": {"BLOCK": _BLOCK}}]
