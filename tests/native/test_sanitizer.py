"""``make asan`` would notice: a launcher that is given too small a buffer must be stopped by AddressSanitizer.

Buffers come from malloc, which the sanitizer watches; torch's CPU allocator is out of its sight on some platforms.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OVERFLOW = """
import ctypes
from fasttfm import _C

allocate = ctypes.CDLL(None).malloc
allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
rows, columns = 4, 64
x, y, statistics = allocate(4 * rows * columns), allocate(4 * rows * columns - {missing}), allocate(8 * rows)
_C.layer_norm_forward_cpu(
    x=x, weight=0, bias=0, y=y, mean=statistics, rstd=statistics + 4 * rows, rows=rows, columns=columns,
    x_stride=columns, eps=1e-5, dtype=0, threads=1,
)
"""


@pytest.mark.skipif("libasan" not in os.environ.get("LD_PRELOAD", ""), reason="needs the sanitizer build: make asan")
@pytest.mark.parametrize("missing", [0, 4])
def test_an_overflow_is_caught(missing: int) -> None:
    command = [sys.executable, "-c", OVERFLOW.format(missing=missing)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert ("heap-buffer-overflow" in result.stderr) is (missing > 0), result.stderr
