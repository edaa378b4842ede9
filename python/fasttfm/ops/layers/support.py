"""Why the native core cannot run transformer layers here."""

from __future__ import annotations

import functools

import torch

from fasttfm import _native
from fasttfm.kernels.common.launch import is_hopper


@functools.cache
def missing_hopper() -> str | None:
    """Why layers are not run in one native call on GPUs of compute capability 9.0; None if they are."""
    reason = _native.missing_hopper()
    if reason is not None:
        return reason
    return None if _native.core().gemm_library_version_cuda() else "found no libcublasLt in the process"


@functools.cache
def missing_cuda(device: torch.device) -> str | None:
    """Why layers are not run in one native call on a GPU; None if they are."""
    reason = missing_hopper()
    return reason if reason or is_hopper(device) else "takes tensors on a GPU of compute capability 9.0"


@functools.cache
def missing_cpu() -> str | None:
    """Why layers are not run in one native call on the CPU; None if they are."""
    if _native.missing() is not None:
        return _native.missing()
    return None if _native.blas() else "found no BLAS in torch's CPU library"
