"""``python -m fasttfm.selftest``: checks the installed package on this machine, in about half a minute.

Each op's first case runs forward and backward with every backend for the device, in every dtype, and is compared with
the reference by the rule of docs/numerics.md. It prints one line per op and backend; the exit code is 1 if a result is
wrong or a kernel fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fasttfm._atomic_files import first_line
from fasttfm._version import __version__
from fasttfm.ops.core.backends import BackendRefused, dtype_name
from fasttfm.testing.call import Call, backends_on
from fasttfm.testing.spec import OpSpec
from fasttfm.testing.specs import all_specs

WRONG = "WRONG"


def main(arguments: Sequence[str] | None = None) -> int:
    device_here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m fasttfm.selftest", description="Checks fasttfm on this machine.")
    parser.add_argument("--device", default=device_here, choices=("cpu", "cuda"), help="default: %(default)s here")
    device = parser.parse_args(arguments).device
    if device == "cuda" and device_here != "cuda":
        parser.error("--device: expected a device that torch sees, got cuda: torch.cuda.is_available() is False")
    begin, wrong = time.perf_counter(), 0
    print(f"fasttfm {__version__} in {Path(__file__).parent}, torch {torch.__version__}, on {device}", flush=True)
    for name, spec in all_specs().items():
        for backend in kernels_on(spec, device):
            results = {dtype_name(dtype): check(spec, backend, dtype, device) for dtype in spec.cases[0].dtypes}
            verdicts = ", ".join(f"{dtype} {found}" for dtype, found in results.items())
            print(f"{name:<24} {backend:<10} {verdicts}", flush=True)
            wrong += sum(found.startswith(WRONG) for found in results.values())
    print(f"{'passed' if wrong == 0 else f'{wrong} failed'} on {device} in {time.perf_counter() - begin:.0f} s")
    return int(wrong > 0)


def kernels_on(spec: OpSpec, device: str) -> list[str]:
    """The op's backends on the device, without Triton's interpreter, which users do not run; the reference only if
    there is no other."""
    interpreter = "triton" if device == "cpu" else None
    found = [name for name in backends_on(spec, device) if name not in ("reference", interpreter)]
    return found or ["reference"]


def check(spec: OpSpec, backend: str, dtype: torch.dtype, device: str) -> str:
    """The verdict on the op's first case."""
    call = Call(spec, spec.cases[0], dtype, backend, device)
    try:
        call.check("result", call.inputs())
    except BackendRefused:  # another backend supports this dtype
        return "not supported"
    except AssertionError as error:
        return f"{WRONG}: {error}"
    except Exception as error:  # a kernel that cannot be launched or compiled here is one line too
        return f"{WRONG}: {type(error).__name__}: {first_line(error)}"
    return "ok"


if __name__ == "__main__":
    sys.exit(main())
