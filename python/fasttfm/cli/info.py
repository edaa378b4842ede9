"""``fasttfm info``: whether this machine runs fast, what the installation is made of, and each op's backends here."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fasttfm import _gpus, _native
from fasttfm._version import __version__
from fasttfm.bench.timing import device_name
from fasttfm.cli.options import Formatter
from fasttfm.cli.readiness import readiness, this_machine
from fasttfm.ops.core.backends import BackendTable, tables
from fasttfm.ops.layers import support

Rows = list[tuple[str, str]]

_PACKAGES = ("torch", "triton", "numpy", "safetensors")


def add_parser(commands: Any) -> None:
    commands.add_parser(
        "info",
        help="check whether this machine runs fast; list versions, devices and backends",
        description="Says whether this machine runs fast and, if not, what to do. Then lists versions, devices, and\n"
        "the backends of every op: yes, no with the reason, or - if the op has no such backend.\n\n  fasttfm info",
        formatter_class=Formatter,
    )


def run(arguments: argparse.Namespace) -> int:
    print(report())
    return 0


def report() -> str:
    """Everything, as text."""
    parts = [
        f"fasttfm {__version__}",
        _section("this machine", [*readiness(this_machine()), ("check", "python -m fasttfm.selftest")]),
        _section("versions", _versions()),
        _section("devices", _devices()),
        "ops\n" + backend_table(tables()),
    ]
    return "\n\n".join(parts)


def _section(title: str, rows: Rows) -> str:
    return "\n".join([title, *(f"  {name:<12} {text}" for name, text in rows)])


def _versions() -> Rows:
    packages = [(name, _package_version(name)) for name in _PACKAGES]
    return [("python", f"{platform.python_version()} on {platform.machine()}"), *packages, ("core", _core_version())]


def _package_version(name: str) -> str:
    try:
        return str(importlib.import_module(name).__version__)
    except ModuleNotFoundError:
        return "not installed"
    except ImportError as error:
        return f"does not load: {error}"


def _core_version() -> str:
    absent = _native.missing()
    if absent is not None:
        return f"missing: {absent}"
    core = _native.core()
    return f"{core.version}, compiled by {core.compiler}, {_cuda_text(core.cuda_version, core.cuda_archs)}"


def _cuda_text(version: int, archs: str) -> str:
    if version == 0:
        return "without CUDA"
    return f"CUDA {_gpus.version_text(version)} for {archs}"


def _devices() -> Rows:
    rows = [
        ("cpu", f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores"),
        ("instructions", _instruction_sets()),
        ("threads", _threads()),
        ("layers", _layers("CPU", support.missing_cpu(), _blas)),
    ]
    if not torch.cuda.is_available():
        return [*rows, ("cuda", "torch sees no CUDA device")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = gpu.total_memory / 2**30
        text = f"{gpu.name}, {memory:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
        reason = None if _native.missing_cuda() else _native.missing_on(index)  # what holds for all is said below
        rows.append((f"cuda:{index}", f"{text}; no CUDA kernels: {reason}" if reason else text))
        missing = support.missing_cuda(torch.device("cuda", index))
        rows.append(("layers", _layers(f"cuda:{index}", missing, _cublaslt)))
    return rows


def _layers(device: str, missing: str | None, library: Callable[[], str]) -> str:
    """How transformer layers are run on a device."""
    if missing is not None:
        return f"on {device} op by op: {missing}"
    return f"on {device} in one native call, GEMMs by {library()}"


def _blas() -> str:
    return f"the BLAS of {os.path.basename(_native.blas())}"


def _cublaslt() -> str:
    return f"cuBLASLt {_native.core().gemm_library_version_cuda()}"


def _instruction_sets() -> str:
    if _native.missing():
        return "no native core"
    core = _native.core()
    return f"{core.active_isa()} (supported: {', '.join(core.supported_isas())})"


def _threads() -> str:
    count = f"{torch.get_num_threads()}, as torch.get_num_threads() says"
    if _native.missing():
        return count
    runtime, reason = _native.shared_openmp()
    if not runtime:
        return f"{count}, started per call: {reason}"
    return f"{count}, shared with torch through {os.path.basename(runtime)}"


def backend_table(ops: Mapping[str, BackendTable]) -> str:
    """Op by backend: "yes", "-" if the op has no such backend, or "no" with the number of a reason, which follows."""
    columns = sorted({name for table in ops.values() for name in table.names}, key=_column_order)
    reasons: list[str] = []

    def cell(absent: Callable[[], str | None] | None) -> str:
        if absent is None:
            return "-"
        reason = absent()
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"no [{reasons.index(reason) + 1}]"

    rows = [("", *columns)]
    for op, table in sorted(ops.items()):
        absent = {backend.name: backend.absent for backend in table.backends}
        rows.append((op, *(cell(absent.get(name)) for name in columns)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"  [{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join(line.rstrip() for line in lines)


def _column_order(name: str) -> tuple[bool, str]:
    """By name, the reference last."""
    return name == "reference", name
