"""Disentangled attention's Triton kernels as they are compiled for a call, for ahead-of-time checks."""

from __future__ import annotations

from fasttfm.kernels.common.launch import next_power_of_2
from fasttfm.kernels.disentangled_attention.triton import BLOCK, needed_memory, precision, tile_options
from fasttfm.kernels.disentangled_attention.triton_backward import _bwd_kv_kernel, _bwd_positions_kernel, _bwd_q_kernel
from fasttfm.kernels.disentangled_attention.triton_forward import _fwd_kernel

_TENSORS = {  # in addition to those that all kernels have
    _fwd_kernel: ("out",),
    _bwd_q_kernel: ("dout", "out", "dq", "dsegment_bias"),
    _bwd_kv_kernel: ("dout", "dk", "dv", "dkey_bias"),
    _bwd_positions_kernel: ("dout",),
}


def compile_signatures(
    head_dim: int,
    element: str,
    target: int,
    *,
    packed: bool = True,
    masked: bool = False,
    dropout: bool = False,
    tables: tuple[bool, bool] = (True, True),
    biased: bool = False,
) -> list[dict[str, object]]:
    """All kernels for heads of ``head_dim`` elements of Triton type ``element``, for a target (90 for sm_90). With both
    tables their tiles do not fit into the registers of the number of warps that is fastest."""
    size = 4 if element == "fp32" else 2
    memory = needed_memory(size, head_dim)
    pointers = dict.fromkeys(
        ("q", "k", "v", "position_keys", "position_queries", "key_bias", "segment_bias"), f"*{element}"
    )
    pointers |= {"distance_rows": "*i32", "segments": "*i32", "bounds": "*i32", "mask": "*u8", "seed": "*i64"}
    pointers |= dict.fromkeys(("lse", "deltas", "sums"), "*fp32")
    heads = ("q", "k", "v", "keys", "queries")
    sizes = dict.fromkeys([f"{tensor}_{axis}" for tensor in heads for axis in ("row", "head")], "i32")
    sizes |= dict.fromkeys(("total", "heads", "tiles", "size", "longest", "table_rows", "middle"), "i32")
    sizes |= {"scale": "fp32", "threshold": "i32", "dropout_scale": "fp32", "sequences": "i32", "chunks": "i32"}
    constants = {
        "PACKED": packed,
        "MASKED": masked,
        "TABLES": tables,
        "BIASES": (biased, biased),
        "DROPOUT": dropout,
        "PRECISION": precision(size),
        "D": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK": BLOCK,
    }
    available = 227 * 1024 if target == 90 else memory
    calls: list[dict[str, object]] = []
    for kernel, tensors in _TENSORS.items():
        known = {**pointers, **dict.fromkeys(tensors, f"*{element}"), **sizes}
        signature = {name: known[name] for name in kernel.arg_names if name in known}
        call = {"kernel": kernel, "signature": signature, "constants": constants, "target": target}
        options = tile_options(size, head_dim, available, tables=kernel is _bwd_positions_kernel)
        calls.append({**call, **options, "least_memory": memory, "allow_spills": True})
    return calls
