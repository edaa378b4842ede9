"""``make asan`` would notice: a launcher that is given too small a buffer must be stopped by AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OVERFLOW = """
import ctypes
import torch
from fasttfm import _C

allocate = ctypes.CDLL(None).malloc
allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
rows, columns = 4, 64
count = rows * columns - {missing}
x, statistics, tensor = allocate(4 * rows * columns), allocate(8 * rows), torch.empty(count)
y = tensor.data_ptr() if {by_torch} else allocate(4 * count)
_C.layer_norm_forward_cpu(
    x=x, weight=0, bias=0, y=y, mean=statistics, rstd=statistics + 4 * rows, rows=rows, columns=columns,
    x_stride=columns, eps=1e-5, dtype=0, threads=1,
)
"""


@pytest.mark.skipif("libasan" not in os.environ.get("LD_PRELOAD", ""), reason="needs the sanitizer build: make asan")
@pytest.mark.parametrize(("by_torch", "missing"), [(False, 1), (True, 1), (True, 0)])
def test_an_overflow_is_caught(by_torch: bool, missing: int) -> None:
    command = [sys.executable, "-c", OVERFLOW.format(by_torch=by_torch, missing=missing)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert ("ERROR: AddressSanitizer" in result.stderr) is (missing > 0), result.stderr
