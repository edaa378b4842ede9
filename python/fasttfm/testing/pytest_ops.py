"""Turns an OpSpec into pytest tests. A test file is the import of its SPEC, and ``Test... = op_tests(SPEC)``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fasttfm import _native
from fasttfm.ops.backends import BackendRefused, tables, triton_interpreted
from fasttfm.testing import harness
from fasttfm.testing.spec import BadCall, OpCase, OpSpec

# For tests that give Triton kernels CPU tensors (tests/conftest.py).
interpreted = pytest.mark.skipif(
    not triton_interpreted(), reason="needs Triton's interpreter: Triton, no CUDA device, and numpy older than 2.4"
)


def op_tests(spec: OpSpec) -> type:
    """A test class with every check that the harness derives from ``spec``."""

    class OpTests:
        @pytest.mark.parametrize(("backend", "case", "dtype"), _cpu_calls(spec))
        def test_accuracy(self, backend: str, case: OpCase, dtype: torch.dtype) -> None:
            with _refusal_skips(spec, case, dtype):
                harness.check_accuracy(spec, case, dtype, backend)

        @pytest.mark.gpu
        @pytest.mark.parametrize(("backend", "case", "dtype"), _gpu_calls(spec))
        def test_accuracy_gpu(self, backend: str, case: OpCase, dtype: torch.dtype) -> None:
            with _refusal_skips(spec, case, dtype, backend):
                harness.check_accuracy(spec, case, dtype, backend, device="cuda")

        @pytest.mark.parametrize(("backend", "case", "dtype"), _cpu_calls(spec, one_dtype=True))
        def test_same_bits(self, backend: str, case: OpCase, dtype: torch.dtype) -> None:
            with _refusal_skips(spec, case, dtype):
                harness.check_same_bits(spec, case, dtype, backend, repeats=1 if backend == "triton" else 5)

        @pytest.mark.gpu
        @pytest.mark.parametrize(("backend", "case", "dtype"), _gpu_calls(spec, one_dtype=True))
        def test_same_bits_gpu(self, backend: str, case: OpCase, dtype: torch.dtype) -> None:
            with _refusal_skips(spec, case, dtype, backend):
                harness.check_same_bits(spec, case, dtype, backend, device="cuda", repeats=10)

        @pytest.mark.parametrize("case", spec.cases, ids=str)
        def test_gradcheck(self, case: OpCase) -> None:
            harness.check_gradients(spec, case)

        @pytest.mark.parametrize("case", spec.cases, ids=str)
        def test_opcheck(self, case: OpCase) -> None:
            harness.check_registration(spec, case, torch.float32)

        @pytest.mark.parametrize("case", spec.cases, ids=str)
        def test_compiled(self, case: OpCase) -> None:
            harness.check_compiled(spec, [case], torch.float32)

        @pytest.mark.gpu
        @pytest.mark.parametrize("case", spec.cases, ids=str)
        def test_compiled_gpu(self, case: OpCase) -> None:
            harness.check_compiled(spec, [case], torch.bfloat16, device="cuda")

        @pytest.mark.gpu
        @pytest.mark.parametrize("case", spec.cases, ids=str)
        def test_cuda_graph(self, case: OpCase) -> None:
            harness.check_cuda_graph(spec, case, torch.bfloat16)

        @pytest.mark.parametrize("case", spec.cases[:1], ids=str)
        def test_autocast(self, case: OpCase) -> None:
            harness.check_autocast(spec, case)

        @pytest.mark.gpu
        @pytest.mark.parametrize("case", spec.cases[:1], ids=str)
        def test_autocast_gpu(self, case: OpCase) -> None:
            harness.check_autocast(spec, case, device="cuda")

        @pytest.mark.parametrize("bad", spec.bad_calls, ids=lambda bad: bad.name)
        def test_bad_call(self, bad: BadCall) -> None:
            harness.check_bad_call(spec, bad)

        @pytest.mark.parametrize("name", spec.mutants)
        def test_mutant_is_rejected(self, name: str) -> None:
            harness.check_mutant_rejected(spec, spec.mutants[name])

    return OpTests


@contextlib.contextmanager
def _refusal_skips(spec: OpSpec, case: OpCase, dtype: torch.dtype, backend: str = "") -> Iterator[None]:
    """A backend may refuse a case, and says why; the op's first case, its typical one, every backend must serve. But
    "cuda" may be for 16-bit types alone, and for one kind of GPU."""
    try:
        yield
    except BackendRefused as refusal:
        narrow = backend == "cuda" and dtype == torch.float32
        if case is spec.cases[0] and not narrow and not _other_gpu(spec, backend):
            raise
        pytest.skip(str(refusal))


def _other_gpu(spec: OpSpec, backend: str) -> bool:
    """Whether there are CUDA kernels and a GPU here, but not the one that they are written for."""
    absent = {found.name: found.absent for found in tables()[spec.name].backends}
    return backend == "cuda" and _native.missing_cuda() is None and absent[backend]() is not None


def _cpu_calls(spec: OpSpec, one_dtype: bool = False) -> list[Any]:
    """CPU tensors go to the native core, the reference and, where there is no GPU, Triton's interpreter: small fp32
    cases only, because it truncates to bf16 where a GPU rounds."""
    calls = []
    for backend in tables()[spec.name].backends:
        if backend.absent() is not None or backend.name == "cuda":
            continue
        interpreted = backend.name == "triton" and triton_interpreted()
        if backend.name == "triton" and not interpreted:
            continue
        for case in spec.cases:
            dtypes = case.dtypes[:1] if one_dtype or interpreted else case.dtypes
            if not interpreted or case.interpret:
                calls += [_call(backend.name, case, dtype) for dtype in dtypes]
    return calls


def _gpu_calls(spec: OpSpec, one_dtype: bool = False) -> list[Any]:
    names = [backend.name for backend in tables()[spec.name].backends if backend.name != "cpu"]
    return [
        _call(name, case, dtype)
        for name in names
        for case in spec.cases
        for dtype in (case.dtypes[-1:] if one_dtype else case.dtypes)
    ]


def _call(backend: str, case: OpCase, dtype: torch.dtype) -> Any:
    return pytest.param(backend, case, dtype, id=f"{backend}-{case}-{str(dtype).removeprefix('torch.')}")
