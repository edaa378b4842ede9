"""The CPU kernels on other machines: those for Arm run in an emulator; those for macOS and Windows are compiled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None, reason=f"requires {COMPILER} and {EMULATOR}"
)
def test_linear_layers_with_the_instructions_of_arm(tmp_path: Path) -> None:
    """SDOT, SMMLA and BFMMLA on a CPU that has all of them, and none on one without."""
    kernels, program = ROOT / "kernels", tmp_path / "linear_products"
    sources = [
        ROOT / "tests/native/linear_products.cpp",
        *(kernels / op / "cpu.cpp" for op in ("int8_linear", "packed_linear")),
        *sorted((kernels / "common/cpu").glob("*.cpp")),
    ]
    options = ["-O1", "-std=c++17", "-static", f"-I{kernels}"]
    subprocess.run([COMPILER, *options, *sources, "-o", program], check=True, stderr=subprocess.DEVNULL)
    for cpu, sets in (("max", "3\n"), ("cortex-a72", "0\n")):
        result = subprocess.run([EMULATOR, "-cpu", cpu, program], capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (0, sets), cpu
