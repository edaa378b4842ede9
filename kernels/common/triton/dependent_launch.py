"""Programmatic dependent launch: a kernel starts while the previous one still runs, and waits before it reads its
result.

A kernel may load before ``wait_for_inputs`` only what no earlier kernel in the stream has written: weights, for
example. Every kernel that is launched in this way waits, so that after the wait all earlier kernels have ended, not
only the previous one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Lets the next kernel start, and waits for the end of all kernels before this one."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


def launch_options(tensor: Tensor, overlap: bool) -> dict[str, Any]:
    """The options of a launch on the tensor's GPU: with ``overlap`` a dependent one where the hardware has it, from
    sm_90 on."""
    if overlap and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
