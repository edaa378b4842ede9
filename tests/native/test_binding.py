"""Wrong calls of the native core raise the documented exceptions; none of them reaches a kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from native.calls import layer_norm_arguments

from fasttfm import _C, _native

FUNCTION, OF_ADDRESSES = "layer_norm_forward", "elementwise_cpu"
NAMES = ("x", "weight", "bias", "y", "statistics", "eps")


def call(rows: torch.Tensor | None = None, **changes: Any) -> dict[str, torch.Tensor]:
    given, outputs = layer_norm_arguments(torch.ones(4, 8) if rows is None else rows)
    getattr(_C, FUNCTION)(*{**dict(zip(NAMES, given, strict=True)), **changes}.values())
    return outputs


def call_with_addresses(**changes: Any) -> torch.Tensor:
    x, y = torch.ones(4), torch.zeros(4)
    given = {"x": x.data_ptr(), "y": y.data_ptr(), "count": 4, "x_dtype": 0, "y_dtype": 0, "function": 0, "threads": 1}
    getattr(_C, OF_ADDRESSES)(*{**given, **changes}.values())
    return y


def test_the_unchanged_calls_compute() -> None:
    assert torch.equal(call_with_addresses(), torch.ones(4))
    rows = torch.arange(32.0).reshape(4, 8)
    assert torch.equal(call(rows)["statistics"][0], rows.mean(dim=1))


# ---- numbers and addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "bits"),
    [
        ("count", "many", 64),
        ("count", 1.5, 64),
        ("count", None, 64),
        ("count", 2**63, 64),
        ("x", -1, 64),
        ("x", 2**64, 64),
        ("x", torch.ones(1), 64),
        ("function", "small", 32),
        ("x_dtype", 2**31, 32),
        ("x_dtype", "bf16", 32),
        ("threads", [2], 32),
    ],
)
def test_an_integer_that_does_not_fit(name: str, value: Any, bits: int) -> None:
    with pytest.raises(TypeError, match=f"^{OF_ADDRESSES}: {name}: expected an integer of {bits} bits, got "):
        call_with_addresses(**{name: value})


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (2**40 + 1, ValueError), (1.5, TypeError)])
def test_a_size_that_no_machine_has(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^embedding_workspace_cpu: rows: expected "):
        _C.embedding_workspace_cpu(value, 8)
    assert _C.embedding_workspace_cpu(2**10, 8) > 0


def test_arguments_have_no_keywords() -> None:
    with pytest.raises(TypeError, match="takes no keyword arguments"):
        _C.embedding_workspace_cpu(rows=1, columns=8)


# ---- functions of tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("x", None, "a tensor, got None"),
        ("x", 2**40, "a tensor, got 1099511627776"),
        ("weight", [1.0], r"a tensor, got \[1.0\]"),
        ("y", torch.empty(4, 8, device="meta"), "a CPU or CUDA tensor with memory of its own, got Tensor"),
        ("eps", "small", "a number, got 'small'"),
        ("eps", None, "a number, got None"),
    ],
)
def test_an_argument_that_a_function_of_tensors_cannot_take(name: str, value: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=f"^{FUNCTION}: {name}: expected {expected}"):
        call(**{name: value})


def test_a_wrong_number_of_arguments() -> None:
    with pytest.raises(TypeError, match=f"^{FUNCTION}: expected 6 arguments, got 1$"):
        getattr(_C, FUNCTION)(torch.ones(4, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.bool])
def test_unknown_dtype_code(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"^dtype code is not 0 \(fp32\), 1 \(bf16\) or 2 \(fp16\)$"):
        call(torch.ones(4, 8).to(dtype))


def test_no_columns() -> None:
    with pytest.raises(ValueError, match=r"^layer_norm: columns must be at least 1$"):
        call(torch.ones(4, 0))


def test_rows_without_a_stride() -> None:
    with pytest.raises(ValueError, match=r"^layer_norm: x must have adjacent columns and one stride between rows$"):
        call(torch.ones(8, 4).t())


@pytest.mark.parametrize(("field", "code"), [("x_dtype", 3), ("y_dtype", -1), ("function", 5), ("function", -1)])
def test_unknown_codes_of_elementwise(field: str, code: int) -> None:
    with pytest.raises(ValueError, match="is not 0"):
        call_with_addresses(**{field: code})


def test_instruction_sets() -> None:
    assert "baseline" in _C.supported_isas()
    assert _C.active_isa() in _C.supported_isas()
    with pytest.raises(ValueError, match=r"^set_isa: name: expected 'baseline', 'avx2' or 'avx512', got 'mmx'$"):
        _C.set_isa("mmx")
    for name in {"baseline", "avx2", "avx512"} - set(_C.supported_isas()):
        with pytest.raises(ValueError, match=rf"^set_isa: name: expected one of supported_isas\(\), got '{name}'$"):
            _C.set_isa(name)
    with pytest.raises(TypeError):
        _C.set_isa(2)


def test_the_environment_selects_the_instruction_set() -> None:
    code = "from fasttfm import _native; print(_native.core().active_isa())"
    environment = {**os.environ, "FASTTFM_ISA": "baseline"}
    asked = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "baseline"


def test_an_unsupported_instruction_set_is_refused() -> None:
    expected = rf"^FASTTFM_ISA: expected one of {', '.join(_C.supported_isas())} on this CPU, got 'mmx'$"
    with pytest.raises(ValueError, match=expected):
        _native._set_isa("mmx")


@pytest.mark.gpu
def test_tensors_on_several_devices() -> None:
    with pytest.raises(ValueError, match=f"^{FUNCTION}: weight: expected a tensor on the device of the first one$"):
        call(torch.ones(4, 8), weight=torch.ones(8, device="cuda"))


def test_every_cuda_launcher_returns_the_status_of_its_device() -> None:
    kernels = Path(__file__).parents[2] / "kernels"
    guards = [
        found
        for path in kernels.rglob("*.cu*")
        for found in re.findall(r"DeviceGuard (\w+)\(.*\n(.*)", path.read_text())
    ]
    assert len(guards) > 10
    for name, following in guards:
        assert following.strip() == f"if ({name}.status().code != StatusCode::ok) return {name}.status();"
