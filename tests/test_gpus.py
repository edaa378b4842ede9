"""Which GPUs and drivers are supported: rules over version numbers, which query no device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm import _gpus, _native
from fasttfm.kernels.attention import tuning
from fasttfm.ops.core import backends
from fasttfm.ops.core.declare import DECLARED, normalizing_ops
from fasttfm.testing.chips import BLOCK_MEMORY, BLOCK_REGISTERS, STATIC_MEMORY, Usage, resource_usage
from fasttfm.testing.harness import check_accuracy
from fasttfm.testing.specs import all_specs

SPECS = all_specs()

ARCHS = "80 90a 80-virtual"

CODE = {"float32": 0, "bfloat16": 1, "float16": 2}
COLUMNS = (8, 256, 512, 768, 1024, 2048, 4096, 8192)


# ---- drivers and compute capabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize(("driver", "toolkit"), [(13000, 13000), (13010, 13000), (13000, 13010), (14000, 13000)])
def test_drivers_of_the_same_or_a_later_major_version_are_supported(driver: int, toolkit: int) -> None:
    assert _gpus.refuse_driver(driver, toolkit) is None


def test_an_older_driver_is_refused() -> None:
    assert _gpus.refuse_driver(12040, 13010) == (
        "the GPU driver supports CUDA up to 12.4, and the native core was built with CUDA 13.1, "
        "which needs a driver for 13.0 or newer"
    )
    assert "CUDA up to 0.0" in str(_gpus.refuse_driver(0, 13000))


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_gpus_that_the_default_build_supports(capability: int) -> None:
    assert _gpus.refuse_capability(capability, ARCHS, 13000, 13000) is None


@pytest.mark.parametrize("capability", [60, 70, 75])
def test_older_gpus_are_refused(capability: int) -> None:
    expected = f"the native core was built for compute capability 8.0, 9.0 and newer, the GPU has {capability / 10}"
    assert _gpus.refuse_capability(capability, ARCHS, 13000, 13000) == expected


def test_ptx_needs_a_driver_that_is_not_older_than_the_toolkit() -> None:
    reason = _gpus.refuse_capability(120, ARCHS, 13000, 13010)
    assert reason is not None
    assert "for 12.0 the GPU driver would have to compile PTX of CUDA 13.1" in reason
    assert _gpus.refuse_capability(89, ARCHS, 13000, 13010) is None  # machine code of 8.0


def test_machine_code_runs_on_its_major_version_from_its_minor_version_on() -> None:
    archs = "86 100a 86-virtual"
    assert _gpus.refuse_capability(86, archs, 13000, 13010) is None
    assert _gpus.refuse_capability(89, archs, 13000, 13010) is None
    assert _gpus.refuse_capability(103, archs, 13000, 13010) is None
    assert _gpus.refuse_capability(80, archs, 13000, 13000) is not None
    assert _gpus.refuse_capability(90, archs, 13000, 13010) is not None


# ---- a machine, simulated --------------------------------------------------------------------------------------------


class Machine:
    """A simulated core that was built with CUDA, and its GPUs."""

    cuda_version, cuda_archs = 13000, ARCHS

    def __init__(self, driver: int, *capabilities: int) -> None:
        self.driver, self.capabilities = driver, capabilities

    def driver_version(self) -> int:
        return self.driver

    def compute_capability(self, device: int) -> int:
        return self.capabilities[device]

    def block_memory(self, device: int) -> int:
        return BLOCK_MEMORY[self.capabilities[device]]


CACHES = (_native.missing_cuda, _native.missing_hopper, _native.missing_on, _native.block_memory)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def set_up(driver: int, *capabilities: int) -> None:
        for function in (*CACHES, backends.refuse_cuda_memory):
            function.cache_clear()
        monkeypatch.setattr(_native, "_core", Machine(driver, *capabilities))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))

    yield set_up
    for function in (*CACHES, backends.refuse_cuda_memory):
        function.cache_clear()


def test_a_machine_with_an_h200(on: Any) -> None:
    on(13000, 90)
    assert _native.missing_cuda() is None
    assert _native.missing_hopper() is None


def test_a_machine_with_an_old_driver(on: Any) -> None:
    on(12080, 90)
    assert "the GPU driver supports CUDA up to 12.8" in str(_native.missing_cuda())
    assert _native.missing_hopper() == _native.missing_cuda()


def test_a_machine_with_an_old_gpu(on: Any) -> None:
    on(13000, 75)
    assert "the GPU has 7.5" in str(_native.missing_cuda())


def test_a_machine_with_an_old_gpu_and_a_new_one(on: Any) -> None:
    on(13000, 75, 90)
    assert _native.missing_cuda() is None
    assert "the GPU has 7.5" in str(_native.missing_on(0))
    assert _native.missing_on(1) is None


class OnGpu:
    """The attributes of a tensor on a GPU that the selection of a backend reads."""

    is_cuda, dtype = True, torch.bfloat16

    def __init__(self, index: int) -> None:
        self.index = index

    def get_device(self) -> int:
        return self.index


def test_tensors_on_the_old_gpu_are_refused(on: Any) -> None:
    on(13000, 75, 90)
    assert "the GPU has 7.5" in str(backends.refuse_cuda(OnGpu(0)))  # type: ignore[arg-type]
    assert backends.refuse_cuda(OnGpu(1)) is None  # type: ignore[arg-type]


def test_shared_memory_is_queried_from_the_device(on: Any) -> None:
    on(13000, 86, 90)
    memory = {BLOCK_MEMORY[86]: 150_000, BLOCK_MEMORY[90]: 200_000}.__getitem__
    assert backends.refuse_cuda_memory(0, memory) == (
        "takes 150000 bytes of shared memory for a block of its backward, the GPU has 101376"
    )
    assert backends.refuse_cuda_memory(1, memory) is None


# ---- shared memory of the CUDA kernels -------------------------------------------------------------------------------

with_cuda = pytest.mark.skipif(
    _native.missing() is not None or _native.core().cuda_version == 0, reason="the native core was built without CUDA"
)


def _memory(
    op: str, columns: int, dtype: str, limit: int, residual: str | None = None, linear_bias: bool = False
) -> int:
    function = getattr(_native.core(), f"{op}_backward_memory_cuda")
    if op == "dropout_add_layer_norm":
        return int(function(columns, CODE[dtype], CODE[residual or dtype], linear_bias, limit))
    return int(function(columns, CODE[dtype], limit))


CALLS: list[tuple[Any, ...]] = [
    (op, dtype, None, False) for op in ("layer_norm", "rms_norm", "gelu_layer_norm") for dtype in CODE
] + [
    ("dropout_add_layer_norm", dtype, residual, linear_bias)
    for dtype in CODE
    for residual in sorted({dtype, "float32"})
    for linear_bias in (False, True)
]


@with_cuda
@pytest.mark.parametrize("chip", BLOCK_MEMORY)
@pytest.mark.parametrize(("op", "dtype", "residual", "linear_bias"), CALLS)
def test_row_kernels_fit_every_gpu(op: str, dtype: str, residual: str | None, linear_bias: bool, chip: int) -> None:
    """Up to 4096 columns on every GPU, which covers common models. Triton runs wider rows that do not fit."""
    limit = BLOCK_MEMORY[chip]
    for columns in COLUMNS:
        needed = _memory(op, columns, dtype, limit, residual, linear_bias)
        assert needed > 0
        wide = op == "gelu_layer_norm" and dtype == "float32" and columns > 4096  # refused for its registers
        if columns <= 4096 or (limit >= BLOCK_MEMORY[80] and not wide):
            assert needed <= limit, (columns, needed)


@with_cuda
@pytest.mark.parametrize(("op", "dtype", "residual", "linear_bias"), CALLS)
def test_hopper_has_its_own_shapes(op: str, dtype: str, residual: str | None, linear_bias: bool) -> None:
    """The smaller blocks are only for GPUs with less shared memory."""
    for columns in COLUMNS:
        needed = [_memory(op, columns, dtype, limit, residual, linear_bias) for limit in (BLOCK_MEMORY[90], 10**9)]
        assert needed[0] == needed[1]


@with_cuda
def test_the_shared_memory_of_unsupported_calls_is_0() -> None:
    core = _native.core()
    assert core.layer_norm_backward_memory_cuda(12, 0, 10**9) == 0
    assert core.layer_norm_backward_memory_cuda(8, 3, 10**9) == 0


@with_cuda
def test_fp32_bert_base_fits_99_kilobytes() -> None:
    """Rows of 768 fp32 elements."""
    assert _memory("layer_norm", 768, "float32", 10**9) > BLOCK_MEMORY[86]
    assert _memory("layer_norm", 768, "float32", BLOCK_MEMORY[86]) < 99 * 1024


PAGE = Path(__file__).parents[1] / "docs" / "gpus.md"


def test_the_page_lists_the_shared_memory_of_gpus() -> None:
    rows = [line.strip("|").split("|")[1:] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head, _, memory = rows[:3]
    found = {
        int(10 * float(capability)): 1024 * int(text.split()[0])
        for column, text in zip(head, memory, strict=True)
        for capability in column.split("(")[0].split(",")
    }
    assert found == BLOCK_MEMORY


ROWS = {
    "layer_norm": "yes; with fp32 in a row up to 4096 columns",
    "rms_norm": "yes; with fp32 in a row up to 4096 columns",
    "dropout_add_layer_norm": "yes; with fp32 in a row up to 4096 columns",
    "gelu_layer_norm": "yes; up to 4096 columns",
}


def test_the_page_lists_every_op_with_cuda_kernels() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `cuda`")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])[1:]]
    of_cuda = {name for name in DECLARED if "cuda" in backends.tables()[name].names}
    assert sorted(listed) == sorted(of_cuda)
    hopper = {name for row in rows if row.split("|")[2].strip() == "no" for name in re.findall(r"`(\w+)`", row)[1:]}
    assert hopper == {
        name
        for name in of_cuda
        for backend in backends.tables()[name].backends
        if backend.absent is _native.missing_hopper
    }
    assert set(ROWS) == set(normalizing_ops())


@with_cuda
@pytest.mark.parametrize("op", ROWS)
def test_the_page_lists_the_rows_that_fit_99_kilobytes(op: str) -> None:
    limit = BLOCK_MEMORY[86]
    wide = [dtype for dtype in CODE if _memory(op, 8192, dtype, limit) <= limit]
    assert wide == ([] if "fp32" not in ROWS[op] else ["bfloat16", "float16"])
    (line,) = (line for line in PAGE.read_text().splitlines() if "| `cuda`" in line and f"`{op}`" in line)
    assert line.split("|")[3].strip() == ROWS[op]


# ---- tiles of Triton's attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [False, True])
def test_wide_heads_have_smaller_tiles_with_little_shared_memory(dropout: bool) -> None:
    calls = {chip: tuning.Call(chip == 90, 256, 2, 4096, 4096, dropout, BLOCK_MEMORY[chip]) for chip in BLOCK_MEMORY}
    for choose in (tuning.query_tiles, tuning.key_tiles):
        tiles = {chip: choose(call) for chip, call in calls.items()}
        assert tiles[86] == tiles[89] == tiles[120] != tiles[80] == tiles[100]
        assert tiles[86].queries < tiles[80].queries


def test_the_backward_of_wide_fp32_heads_needs_tiles_that_fit() -> None:
    refused = [chip for chip, memory in BLOCK_MEMORY.items() if tuning.refuse_backward(256, 4, memory) is not None]
    assert refused == [80, 86, 89, 120]
    assert all(tuning.refuse_backward(*call, 99 * 1024) is None for call in ((128, 4), (256, 2)))


def test_fp32_heads_of_128_have_smaller_tiles_with_little_shared_memory() -> None:
    calls = {chip: tuning.Call(chip == 90, 128, 4, 4096, 4096, True, BLOCK_MEMORY[chip]) for chip in (80, 86, 90)}
    tiles = {chip: tuning.key_tiles(call) for chip, call in calls.items()}
    assert tiles[86].queries < tiles[80].queries == tiles[90].queries


def test_other_heads_have_the_same_tiles_on_all_gpus_but_hopper() -> None:
    for head_dim in (16, 64, 128):
        calls = [tuning.Call(False, head_dim, 2, 4096, 4096, False, BLOCK_MEMORY[chip]) for chip in (80, 86, 100)]
        for choose in (tuning.forward_tiles, tuning.query_tiles, tuning.key_tiles):
            assert len({choose(call) for call in calls}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("chip", [80, 86])
def test_the_tiles_of_other_gpus(chip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on this GPU."""
    from fasttfm.kernels.attention import triton

    monkeypatch.setattr(triton, "is_hopper", lambda device: False)
    monkeypatch.setattr(triton, "block_memory", lambda tensor: BLOCK_MEMORY[chip])
    for name in ("head_dim_256", "typical", "packed_causal"):
        (case,) = (each for each in SPECS["attention"].cases if each.name == name)
        check_accuracy(SPECS["attention"], case, torch.bfloat16, "triton", "cuda")
        check_accuracy(SPECS["attention"], case, torch.float32, "triton", "cuda")


# ---- machine code ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machine_code() -> list[Usage]:
    """The kernels of the native core."""
    pytest.importorskip("triton", reason="cuobjdump comes with Triton")
    return resource_usage(Path(_native.core().__file__))


@with_cuda
def test_static_shared_memory_fits_every_gpu(machine_code: list[Usage]) -> None:
    assert {"sm_80", "sm_90"} <= {usage.machine for usage in machine_code}
    assert not [usage for usage in machine_code if usage.shared > STATIC_MEMORY]


@with_cuda
def test_row_kernels_have_registers_for_their_blocks(machine_code: list[Usage]) -> None:
    """A shape's threads are part of the kernel's name."""
    threads = {usage: re.search(r"RowShapeILi\d+ELi\d+ELi(\d+)E", usage.kernel) for usage in machine_code}
    rows = {usage: int(found[1]) for usage, found in threads.items() if found is not None}
    assert {128, 256, 384} <= set(rows.values())
    assert not [usage for usage, block in rows.items() if usage.block_registers(block) > BLOCK_REGISTERS]


# ---- on a GPU --------------------------------------------------------------------------------------------------------

SIMILAR = [
    (op, case.name)
    for op in normalizing_ops()
    for case in SPECS[op].cases
    if case.name in ("typical", "plain", "no_dropout", "fp32_residual", "linear_bias_alone", "large_mean")
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [760, 1024, 2048, 4096])
@pytest.mark.parametrize(("op", "name"), SIMILAR)
def test_the_kernels_of_smaller_gpus(
    op: str, name: str, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks for GPUs with 99 KB of shared memory also run on every other GPU."""
    monkeypatch.setattr(_native, "block_memory", lambda index: BLOCK_MEMORY[86])
    (case,) = (each for each in SPECS[op].cases if each.name == name)
    case = dataclasses.replace(case, sizes={**case.sizes, "shape": (517, columns)})
    check_accuracy(SPECS[op], case, dtype, "cuda", "cuda")


@pytest.mark.gpu
def test_a_launch_that_fails_leaves_no_pending_error() -> None:
    x = torch.randn(4, 64, device="cuda")
    y, statistics = torch.empty_like(x), torch.empty(2, 4, device="cuda")
    core = _native.core()
    core.layer_norm_forward(x, None, None, y, statistics, 1e-5)
    expected = y.clone()
    y.zero_()
    many = x[:1].expand(2**40, 64)
    with pytest.raises(RuntimeError, match=r"invalid (configuration )?argument"):
        core.layer_norm_forward(many, None, None, y, statistics, 1e-5)  # the grid's size is 0 modulo 2^32
    core.layer_norm_forward(x, None, None, y, statistics, 1e-5)
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_device_properties_of_the_core() -> None:
    core = _native.core()
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        assert core.compute_capability(index) == 10 * major + minor
        assert core.block_memory(index) == BLOCK_MEMORY.get(10 * major + minor, core.block_memory(index))
    assert core.driver_version() >= core.cuda_version // 1000 * 1000
    assert core.compute_capability(torch.cuda.device_count()) == core.block_memory(-1) == 0
