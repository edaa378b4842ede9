"""Every Triton kernel compiles for sm_80 and sm_90, and one of each op for sm_100 and sm_120, without spills and within
the shared memory of every GPU that runs it."""

import importlib.util
import os
import subprocess
import sys

import pytest

from fasttfm.testing.aot import TARGETS
from fasttfm.testing.specs import all_specs


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("op", [name for name, spec in all_specs().items() if spec.triton_kernels])
@pytest.mark.parametrize("target", TARGETS)
def test_triton_kernels_compile(op: str, target: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fasttfm.testing.aot", op, "--target", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
