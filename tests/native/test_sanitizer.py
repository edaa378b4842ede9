"""``make asan`` can fail: AddressSanitizer reports a launcher that gets a buffer that is too small."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

OVERFLOW = """
import ctypes
import torch
from fasttfm import _C

allocate = ctypes.CDLL(None).malloc
allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
count = 256
x, tensor = allocate(4 * count), torch.empty(count - {missing})
y = tensor.data_ptr() if {by_torch} else allocate(4 * (count - {missing}))
_C.elementwise_cpu(x, y, count, 0, 0, 0, 1)
"""


ARM = platform.machine() in ("aarch64", "arm64")
mimalloc = pytest.mark.skipif(ARM, reason="torch allocates with mimalloc on Arm: AddressSanitizer does not see it")


@pytest.mark.skipif("libasan" not in os.environ.get("LD_PRELOAD", ""), reason="needs the sanitizer build: make asan")
@pytest.mark.parametrize(("by_torch", "missing"), [(False, 1), pytest.param(True, 1, marks=mimalloc), (True, 0)])
def test_an_overflow_is_caught(by_torch: bool, missing: int) -> None:
    command = [sys.executable, "-c", OVERFLOW.format(by_torch=by_torch, missing=missing)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert ("ERROR: AddressSanitizer" in result.stderr) is (missing > 0), result.stderr
