"""Turns an OpSpec into pytest tests. A test file is the import of its SPEC, and ``Test... = op_tests(SPEC)``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from fasttfm import _native
from fasttfm.ops.core.backends import BackendRefused, tables
from fasttfm.testing import fuzz, harness
from fasttfm.testing.call import Call, backends_on
from fasttfm.testing.properties import GRADIENT_PROPERTIES, KERNEL_PROPERTIES, PROPERTIES
from fasttfm.testing.spec import BadCall, OpCase, OpSpec

# For tests that give Triton kernels CPU tensors: tests/conftest.py skips them where Triton's interpreter does not run.
interpreted = pytest.mark.interpreted
FUZZ_CALLS = 24  # for each op; `make fuzz` runs thousands


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

        @pytest.mark.parametrize("case", _cases(spec))
        def test_gradcheck(self, case: OpCase) -> None:
            harness.check_gradients(spec, case)

        @pytest.mark.parametrize("case", _cases(spec))
        def test_opcheck(self, case: OpCase) -> None:
            harness.check_registration(spec, case, torch.float32)

        @pytest.mark.parametrize("case", _cases(spec, first=1))
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

    if not spec.differentiable:
        del OpTests.test_gradcheck
    return type("OpTests", (OpTests, _property_tests(spec)), {})


def _property_tests(spec: OpSpec) -> type:
    """Tests of an op's properties (properties.py) and of random calls (fuzz.py)."""

    class PropertyTests:
        @pytest.mark.parametrize(("name", "backend", "case"), _property_calls(spec))
        def test_property(self, name: str, backend: str, case: OpCase) -> None:
            with _refusal_skips(spec, case, torch.float32):
                PROPERTIES[name](Call(spec, case, torch.float32, backend))

        @pytest.mark.gpu
        @pytest.mark.parametrize("name", _properties(spec))
        @pytest.mark.parametrize("backend", _gpu_backends(spec))
        def test_property_gpu(self, name: str, backend: str) -> None:
            case = spec.cases[0]
            with _refusal_skips(spec, case, torch.bfloat16, backend):
                PROPERTIES[name](Call(spec, case, torch.bfloat16, backend, device="cuda"))

        @pytest.mark.skipif(spec.random_case is None, reason="the op's spec draws no random cases")
        def test_random_calls(self) -> None:
            result = fuzz.run_calls(spec, range(FUZZ_CALLS), seed=0, interpreter=False)
            assert result.failures == [], "\n".join(result.failures)

        @pytest.mark.gpu
        @pytest.mark.skipif(spec.random_case is None, reason="the op's spec draws no random cases")
        def test_random_calls_gpu(self) -> None:
            result = fuzz.run_calls(spec, range(FUZZ_CALLS), seed=0, device="cuda")
            assert result.failures == [], "\n".join(result.failures)

    return PropertyTests


@contextlib.contextmanager
def _refusal_skips(spec: OpSpec, case: OpCase, dtype: torch.dtype, backend: str = "") -> Iterator[None]:
    """A backend may refuse a case with a reason, but every backend must support the op's first case, the typical one.
    Only "cuda" may be limited to 16-bit types and to one kind of GPU."""
    try:
        yield
    except BackendRefused as refusal:
        narrow = backend == "cuda" and dtype == torch.float32
        if case is spec.cases[0] and not narrow and not _other_gpu(spec, backend):
            raise
        pytest.skip(str(refusal))


def _other_gpu(spec: OpSpec, backend: str) -> bool:
    """Whether there are CUDA kernels and a GPU, but the kernels are for another GPU."""
    absent = {entry.name: entry.absent for entry in tables()[spec.name].backends}
    return backend == "cuda" and _native.missing_cuda() is None and absent[backend]() is not None


def _typical(spec: OpSpec) -> list[OpCase]:
    """The cases that all checks use: the first one, and those of the properties."""
    return [case for number, case in enumerate(spec.cases) if number == 0 or case.name in spec.property_cases]


def _cases(spec: OpSpec, first: int | None = None) -> list[Any]:
    """All cases, for checks that do not depend on the machine; those that are not typical are slow tests."""
    quick = _typical(spec)[:first]
    return [pytest.param(case, id=str(case), marks=[] if case in quick else pytest.mark.slow) for case in spec.cases]


def _cpu_calls(spec: OpSpec, one_dtype: bool = False) -> list[Any]:
    """Calls of the native core, of the reference and, if there is no GPU, of Triton's interpreter. The latter gets
    small fp32 cases only: it truncates to bf16 where a GPU rounds. The backend that users get runs every case; for the
    others, which few calls on a CPU reach, all but the typical cases are slow tests."""
    calls = []
    for rank, backend in enumerate(backends_on(spec, "cpu")):
        interpreted = backend == "triton"
        for case in spec.cases:
            dtypes = case.dtypes[:1] if one_dtype or interpreted else case.dtypes
            marks = [] if rank == 0 or case in _typical(spec)[: 1 if interpreted else None] else [pytest.mark.slow]
            if not interpreted or case.interpret:
                calls += [_call(backend, case, dtype, marks) for dtype in dtypes]
    return calls


def _property_calls(spec: OpSpec) -> list[Any]:
    """The op's ``property_cases``. The reference and Triton's interpreter get only the first case, the latter only
    the properties that depend on the kernels."""
    named = {case.name: case for case in spec.cases}
    cases = [named[name] for name in spec.property_cases] or spec.cases[:1]
    calls = []
    for backend in backends_on(spec, "cpu"):
        interpreted = backend == "triton"
        names = KERNEL_PROPERTIES if interpreted else _properties(spec)
        for case in cases[:1] if backend in ("triton", "reference") else cases:
            marks = [pytest.mark.slow] if interpreted else []
            calls += [pytest.param(name, backend, case, id=f"{name}-{backend}-{case}", marks=marks) for name in names]
    return calls


def _properties(spec: OpSpec) -> tuple[str, ...]:
    """The properties that hold for an op."""
    return tuple(name for name in PROPERTIES if spec.differentiable or name not in GRADIENT_PROPERTIES)


def _gpu_backends(spec: OpSpec) -> list[str]:
    return [backend.name for backend in tables()[spec.name].backends if backend.name != "cpu"]


def _gpu_calls(spec: OpSpec, one_dtype: bool = False) -> list[Any]:
    return [
        _call(name, case, dtype)
        for name in _gpu_backends(spec)
        for case in spec.cases
        for dtype in (case.dtypes[-1:] if one_dtype else case.dtypes)
    ]


def _call(backend: str, case: OpCase, dtype: torch.dtype, marks: Sequence[Any] = ()) -> Any:
    return pytest.param(backend, case, dtype, id=f"{backend}-{case}-{str(dtype).removeprefix('torch.')}", marks=marks)
