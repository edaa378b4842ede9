"""The peers of attention's benchmarks: SDPA's kernels, torch's varlen_attn and FlashAttention-4."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from fasttfm.bench.peers import Inputs, PeerCall, PeerUnavailable, flash_attn_4, peer_module
from fasttfm.kernels.attention.problem import window_bounds
from fasttfm.ops.linear import bf16_products


def _sdpa(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
    """torch's attention; sequences of different lengths are padded before the measurement, and masked."""
    if options.get("window") is not None:
        raise PeerUnavailable("SDPA has no windows")
    q, k, v, starts = inputs["q"], inputs["k"], inputs["v"], inputs.get("cu_seqlens")
    leaves = None
    if starts is not None:
        longest = options["max_seqlen"]
        lengths = starts.diff()
        parts = [x.detach().split(lengths.tolist()) for x in (q, k, v)]
        leaves = [torch.stack([pad(x, (0, 0, 0, 0, 0, longest - len(x))) for x in part]) for part in parts]
        q, k, v = (leaf.requires_grad_() for leaf in leaves)
    else:
        lengths = inputs.get("lengths")
    mask = None
    if lengths is not None:  # additive, in q's dtype: the fast paths accept it without a conversion
        absent = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
        mask = torch.zeros_like(absent, dtype=q.dtype).masked_fill(absent, -torch.inf)[:, None, None, :]
        if options.get("causal", False):
            raise PeerUnavailable("SDPA takes a mask or is_causal, not both")

    def call() -> Any:
        return scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=options.get("dropout_p", 0.0),
            is_causal=options.get("causal", False),
            enable_gqa=k.shape[2] != q.shape[2],
        ).transpose(1, 2)

    return call if leaves is None else PeerCall(call, leaves)


def sdpa_forced(backend: SDPBackend) -> Callable[[Inputs, Mapping[str, Any]], Callable[[], Any]]:
    """SDPA with one of its kernels; a call that this kernel does not support raises."""

    def build(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
        if not torch.cuda.is_available():
            raise PeerUnavailable(f"{backend.name} needs a GPU")
        masked = "lengths" in inputs or "cu_seqlens" in inputs
        if backend is SDPBackend.FLASH_ATTENTION and masked:
            raise PeerUnavailable("FLASH_ATTENTION takes no mask")
        function = _sdpa(inputs, options)

        def call() -> Any:
            with sdpa_kernel(backend):
                return function()

        return PeerCall(call, function.leaves) if isinstance(function, PeerCall) else call

    return build


def sdpa_cpu(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
    if inputs["q"].is_cuda:
        raise PeerUnavailable("on a GPU each of SDPA's kernels is a peer of its own")
    if inputs["q"].dtype == torch.bfloat16 and bf16_products() == "none":
        raise PeerUnavailable("torch multiplies bf16 hundreds of times slower than fp32 on this CPU")
    return _sdpa(inputs, options)


def sdpa_widened(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
    """SDPA in fp32 on 16-bit inputs: a workaround for CPUs on which torch's bf16 products are slow."""
    dtype = inputs["q"].dtype
    if inputs["q"].is_cuda or dtype == torch.float32:
        raise PeerUnavailable("for 16-bit types on a CPU")

    def call() -> Any:
        wide = {name: inputs[name].float() for name in "qkv"}
        return _sdpa({**inputs, **wide}, options)().to(dtype)

    return call


def varlen(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
    """torch's FlashAttention-2 for packed sequences."""
    if "cu_seqlens" not in inputs or not inputs["q"].is_cuda:
        raise PeerUnavailable("varlen_attn takes packed sequences, on a GPU")
    if options.get("dropout_p", 0.0):
        raise PeerUnavailable("varlen_attn has no dropout")
    varlen_attn = getattr(peer_module("torch.nn.attention.varlen"), "varlen_attn", None)
    if varlen_attn is None:
        raise PeerUnavailable(f"torch {torch.__version__} has no varlen_attn")
    bounds = window_bounds(options.get("causal", False), options.get("window"))
    if "window_size" in inspect.signature(varlen_attn).parameters:
        mask: dict[str, Any] = {"window_size": bounds}
    elif options.get("window") is not None:
        raise PeerUnavailable(f"varlen_attn of torch {torch.__version__} has no windows")
    else:
        mask = {"is_causal": options.get("causal", False)}
    starts, longest = inputs["cu_seqlens"], options["max_seqlen"]
    tensors = (inputs["q"], inputs["k"], inputs["v"], starts, starts, longest, longest)
    return lambda: varlen_attn(*tensors, **mask)


def fa4(inputs: Inputs, options: Mapping[str, Any], deterministic: bool = False) -> Callable[[], Any]:
    """FlashAttention-4: no dropout, no padding, no bias; its backward adds with atomics, in a fixed order if
    ``deterministic``."""
    if options.get("dropout_p", 0.0) or "lengths" in inputs or inputs.get("bias") is not None:
        raise PeerUnavailable("FlashAttention-4 has no dropout, no lengths of padded sequences and no bias")
    packed = "cu_seqlens" in inputs
    function = flash_attn_4("flash_attn_varlen_func" if packed else "flash_attn_func")
    named: dict[str, Any] = {"causal": options.get("causal", False), "softmax_scale": options.get("scale")}
    named["deterministic"] = deterministic
    named["window_size"] = tuple(options.get("window") or (None, None))
    if packed:
        starts, longest = inputs["cu_seqlens"], options["max_seqlen"]
        named |= {"cu_seqlens_q": starts, "cu_seqlens_k": inputs.get("cu_seqlens_k", starts)}
        named |= {"max_seqlen_q": longest, "max_seqlen_k": options.get("max_seqlen_k", longest)}
    return lambda: function(inputs["q"], inputs["k"], inputs["v"], **named)[0]
