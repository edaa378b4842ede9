"""Loads the native core and ties it to torch: dtype codes, thread count, and torch's own OpenMP runtime."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fasttfm import _gpus

# kernels/common/dtype.h
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

try:
    from fasttfm import _C as _core

    _missing = ""
except ImportError as error:
    _core = None  # type: ignore[assignment]
    _missing = f"the native core did not load ({error}); `pip install .` builds it"


def _set_isa(name: str | None) -> None:
    """Makes the core use another instruction set than the widest that the CPU supports, for tests and benchmarks."""
    if not name or _core is None:
        return
    if name not in _core.supported_isas():
        raise ValueError(f"FASTTFM_ISA: expected one of {', '.join(_core.supported_isas())} on this CPU, got {name!r}")
    _core.set_isa(name)


_set_isa(os.environ.get("FASTTFM_ISA"))


def _no_signature(*_: object) -> None:
    return None


# The facts that a call's checks and choice of a backend depend on, as bytes, if all tensors are plain; otherwise None.
signature: Callable[..., bytes | None] = _no_signature
# Prepares the launches of a Triton kernel; None without the core.
triton_kernel: Callable[..., Callable[..., Callable[..., object]]] | None = None
# For inference/batches.py; None without the core.
sequences: Callable[[Any, int], Any] | None = None
stage_sequences: Callable[..., tuple[Any, Any, tuple[int, int, int]] | None] | None = None
write_bucket: Callable[..., None] | None = None
if _core is not None:
    _core.use_torch(torch)
    signature = _core.signature
    triton_kernel = _core.triton_kernel
    sequences = _core.Sequences.of
    stage_sequences = _core.Sequences.stage
    write_bucket = _core.write_bucket


class _NeverRaised(RuntimeError):
    """Replaces the core's exception if there is no core; it is never raised."""


# Raised if blocks of a launch wait for each other, but do not all fit on the GPU at the same time.
DoesNotFit: type[RuntimeError] = _NeverRaised if _core is None else _core.DoesNotFit


def missing() -> str | None:
    """Why there is no native core; None if there is one."""
    return _missing or None


@functools.cache
def missing_cuda() -> str | None:
    """Why the native core cannot launch CUDA kernels here; None if it can."""
    if _core is None:
        return _missing
    if _core.cuda_version == 0:
        return "the native core was built without CUDA (FASTTFM_CUDA=ON pip install . builds it)"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    reason = _gpus.refuse_driver(_core.driver_version(), _core.cuda_version)
    if reason is not None:
        return reason
    reasons = [missing_on(index) for index in range(torch.cuda.device_count())]
    return None if None in reasons else reasons[0]


@functools.cache
def missing_on(index: int) -> str | None:
    """Why the native core has no CUDA kernels for this GPU, although it can launch kernels on others; None if it
    has."""
    capability, driver = _core.compute_capability(index), _core.driver_version()
    return _gpus.refuse_capability(capability, _core.cuda_archs, driver, _core.cuda_version)


@functools.cache
def block_memory(index: int) -> int:
    """Bytes of shared memory that a block may have on a GPU."""
    return int(_core.block_memory(index))


@functools.cache
def missing_hopper() -> str | None:
    """Why the native core cannot launch the Hopper kernels; None if it can."""
    if missing_cuda() is not None:
        return missing_cuda()
    if "90a" not in _core.cuda_archs.split():
        return f"the native core was built without kernels for 90a (FASTTFM_CUDA_ARCHS), for {_core.cuda_archs}"
    if not any(_core.compute_capability(index) == 90 for index in range(torch.cuda.device_count())):
        return "torch sees no CUDA device of compute capability 9.0"
    return None


@functools.cache
def core() -> ModuleType:
    """The extension module, sharing torch's OpenMP threads."""
    if _core is None:
        raise ImportError(_missing)
    shared_openmp()
    return _core


@functools.cache
def blas() -> str:
    """The file of the BLAS that torch's CPU library contains or depends on; "" if the core finds none."""
    return core().find_blas(str(_torch_library()))


def _torch_library() -> Path:
    return Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@functools.cache
def shared_openmp() -> tuple[str, str]:
    """The file of torch's OpenMP runtime, on whose threads the core runs; or "" and why it starts its own threads."""
    return _core.share_openmp(str(_torch_library()))


def as_parameter(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A contiguous parameter of this dtype, copied only if it is not already."""
    if tensor is None or (tensor.dtype is dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()
