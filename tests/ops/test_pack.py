"""pack, unpack and the helpers around cu_seqlens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from fasttfm import ops
from fasttfm.ops.pack import PACK, UNPACK, sequence_means
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.specs.pack import SPEC, UNPACK_SPEC

TestPack = op_tests(SPEC)
TestUnpack = op_tests(UNPACK_SPEC)

DTYPES = [torch.int64, torch.int32, torch.bool, torch.uint8, torch.float64, torch.bfloat16]
BACKENDS = ["cpu", "triton", "reference"]


def padded_batch(lengths: list[int], longest: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Token s of sequence b is 1000 * (b + 1) + s, padding is 0."""
    x = torch.zeros(len(lengths), longest, dtype=torch.int64)
    for b, length in enumerate(lengths):
        x[b, :length] = 1000 * (b + 1) + torch.arange(length)
    return x.to(dtype)


def random_lengths(seed: int) -> tuple[list[int], int, int]:
    """Lengths of sequences, some of them empty, and the excess rows of the packed and of the padded tensor."""
    random = Random(seed)
    lengths = [random.choice([0, random.randint(1, 9)]) for _ in range(seed % 8)]
    return lengths, random.randint(0, 3), random.randint(0, 4)


@pytest.mark.parametrize("seed", range(60))
def test_round_trip(seed: int) -> None:
    lengths, spare, more = random_lengths(seed)
    longest = max(lengths, default=0) + more
    x = padded_batch(lengths, longest)
    total = min(sum(lengths) + spare, x.numel())
    cu_seqlens = ops.cu_seqlens_from_lengths(lengths)
    packed = ops.pack(x, cu_seqlens, total=total)
    expected = [1000 * (b + 1) + s for b, length in enumerate(lengths) for s in range(length)]
    assert packed.tolist() == expected + [0] * (total - len(expected))
    assert torch.equal(ops.unpack(packed, cu_seqlens, longest), x)


@interpreted
@pytest.mark.parametrize("seed", range(15))
def test_backends_agree(seed: int) -> None:
    lengths, spare, _ = random_lengths(seed)
    longest = max(lengths, default=0) + 2
    x = padded_batch(lengths, longest)
    total = min(sum(lengths) + spare, x.numel())
    cu_seqlens = ops.cu_seqlens_from_lengths(lengths)
    packed = [ops.pack(x, cu_seqlens, total=total, backend=backend) for backend in BACKENDS]
    restored = [ops.unpack(packed[0], cu_seqlens, longest, backend=backend) for backend in BACKENDS]
    for other in (1, 2):
        assert torch.equal(packed[0], packed[other])
        assert torch.equal(restored[0], restored[other])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_any_type(dtype: torch.dtype, backend: str) -> None:
    x = padded_batch([2, 0, 3], 4, dtype)
    cu_seqlens = ops.cu_seqlens_from_lengths([2, 0, 3])
    packed = ops.pack(x, cu_seqlens, backend=backend)
    assert packed.dtype == dtype
    assert torch.equal(ops.unpack(packed, cu_seqlens, 4, backend=backend), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_type_gpu(dtype: torch.dtype) -> None:
    x = padded_batch([2, 0, 3], 4, dtype).cuda()
    cu_seqlens = ops.cu_seqlens_from_lengths([2, 0, 3], device="cuda")
    packed = ops.pack(x, cu_seqlens, backend="triton")
    assert torch.equal(ops.unpack(packed, cu_seqlens, 4, backend="triton"), x)


@pytest.mark.gpu
def test_nothing_synchronizes_with_the_gpu() -> None:
    x = padded_batch([2, 0, 3], 4).cuda()
    lengths = torch.tensor([2, 0, 3], device="cuda")
    ops.unpack(ops.pack(x, lengths=[2, 0, 3]), ops.cu_seqlens_from_lengths(lengths), 4)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = ops.pack(x, lengths=[2, 0, 3])
        cu_seqlens = ops.cu_seqlens_from_lengths(lengths)
        again = ops.pack(x, cu_seqlens, total=5)
        restored = ops.unpack(packed, cu_seqlens, 4)
        ops.position_ids_from_cu_seqlens(cu_seqlens, total=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(packed, again)
    assert torch.equal(restored, x)


# ---- memory around the tensors ---------------------------------------------------------------------------------------


UNWRITTEN = 9  # in results before a call


class Guards:
    """Places tensors in larger buffers that are full of a number. A kernel that reads outside of its tensors returns
    this number or depends on it; one that writes outside overwrites it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._buffers: list[tuple[torch.Tensor, int]] = []
        self._empty = torch.empty

    def empty(self, *shape: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """In place of ``torch.empty``."""
        size = torch.Size(shape[0] if isinstance(shape[0], (tuple, list, torch.Size)) else shape)
        around = 128 * max(16, size.numel())  # the number of elements before the tensor, and after it
        buffer = self._empty(2 * around + size.numel(), dtype=dtype, device=device).fill_(self.number)
        self._buffers.append((buffer, around))
        return buffer[around : around + size.numel()].view(size).fill_(UNWRITTEN)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def check(self) -> None:
        for buffer, around in self._buffers:
            assert bool((buffer[:around] == self.number).all()), "written before a tensor"
            assert bool((buffer[-around:] == self.number).all()), "written after a tensor"


def check_accesses(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., torch.Tensor], *tensors: torch.Tensor, ordered: bool = True
) -> torch.Tensor:
    """The result of ``call``, which accesses only its tensors and its result. Not ``ordered`` are calls that write an
    element more than once in any order: their results may differ."""
    results = []
    for number in (1, 6):  # also possible boundaries of sequences
        guards = Guards(number)
        placed = [guards.place(each) for each in tensors]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", guards.empty)
            results.append(call(*placed))
        guards.check()
        for each, given in zip(placed, tensors, strict=True):
            assert torch.equal(each, given)
        assert not bool((results[-1] == number).any()), "returns memory outside of the tensors"
    if ordered:
        assert torch.equal(*results), "depends on memory outside of the tensors"
    return results[0]


BOUNDARIES = {
    "decreasing": [0, 90, 5, 7],
    "negative": [-4, 2, 3, 5],
    "past the end": [3, 9, 9, 100],
    "huge": [0, 0, 0, 2**31 - 1],
    "negative and huge": [-(2**31), -5, 2**31 - 1, 7],
    "right": [0, 4, 4, 7],
}
COPIES = {
    "rows of 160 bytes": ((40,), torch.float32),
    "rows of 5 bytes": ((5,), torch.uint8),
    "bytes": ((), torch.uint8),
}


def _copy_calls(backend: str, copy: str) -> dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]]:
    """The two ops as functions of a tensor and cu_seqlens that validate nothing, and their tensors."""
    shape, dtype = COPIES[copy]
    x = torch.arange(12 * math.prod(shape)).view(3, 4, *shape).remainder(200).add(20).to(dtype)
    calls = {}
    for name, op, tensor, size in (("pack", PACK, x, 7), ("unpack", UNPACK, x.flatten(0, 1)[:7], 4)):
        (chosen,) = (each for each in op.table.backends if each.name == backend)
        calls[name] = (partial(lambda run, size, *given: run(*given, size), chosen.forward, size), tensor)
    return calls


DEVICES = [
    pytest.param("triton", "cpu", marks=interpreted),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("boundaries", BOUNDARIES)
@pytest.mark.parametrize(("backend", "device"), DEVICES)
def test_wrong_boundaries_access_nothing_outside_of_the_tensors(
    backend: str, device: str, boundaries: str, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cu_seqlens = torch.tensor(BOUNDARIES[boundaries], dtype=torch.int32, device=device)
    references = _copy_calls("reference", copy)
    for name, (call, tensor) in _copy_calls(backend, copy).items():
        tensor = tensor.to(device)
        scatters = backend == "triton" and name == "pack"  # not to rows outside of sequences; to some more than once
        result = check_accesses(monkeypatch, call, tensor, cu_seqlens, ordered=device == "cpu" or not scatters)
        expected = {0, *tensor.flatten().tolist()}
        assert set(result.flatten().tolist()) <= (expected | {UNWRITTEN} if scatters else expected), name
        if boundaries == "right":
            assert torch.equal(result, references[name][0](tensor, cu_seqlens))


@pytest.mark.parametrize("boundaries", BOUNDARIES)
@pytest.mark.parametrize(("backend", "device"), DEVICES[:2])
def test_means_with_wrong_boundaries_access_nothing_outside_of_the_tensors(
    backend: str, device: str, boundaries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasttfm.kernels.pack.triton_mean import sequence_means_triton

    cu_seqlens = torch.tensor(BOUNDARIES[boundaries], dtype=torch.int32, device=device)
    x = torch.randn(7, 70, generator=torch.Generator().manual_seed(0)).to(device)
    result = check_accesses(monkeypatch, lambda x, bounds: sequence_means_triton(x, bounds, 1), x, cu_seqlens)
    assert not bool((result == UNWRITTEN).any())


def test_guards_find_accesses_outside_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(6.0).add(20)

    def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
        return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + by)

    def copy(x: torch.Tensor, *, read: int = 0, write: int = 0) -> torch.Tensor:
        result = torch.empty(6, dtype=x.dtype, device=x.device)
        shifted(result, write)[:] = shifted(x, read)
        return result

    assert torch.equal(check_accesses(monkeypatch, copy, x), x)
    for broken in ({"read": 1}, {"read": -700}, {"write": 1}, {"write": -1}):
        with pytest.raises(AssertionError):
            check_accesses(monkeypatch, partial(copy, **broken), x)


# ---- helpers around cu_seqlens ---------------------------------------------------------------------------------------


def test_lengths_may_be_given() -> None:
    x = padded_batch([2, 0, 3], 4)
    expected = ops.pack(x, ops.cu_seqlens_from_lengths([2, 0, 3]))
    assert torch.equal(ops.pack(x, lengths=[2, 0, 3]), expected)
    assert torch.equal(ops.pack(x, lengths=torch.tensor([2, 0, 3])), expected)


def test_cu_seqlens_from_lengths() -> None:
    for lengths in ([2, 0, 3], torch.tensor([2, 0, 3]), torch.tensor([2, 0, 3], dtype=torch.int32)):
        found = ops.cu_seqlens_from_lengths(lengths)
        assert found.dtype == torch.int32
        assert found.tolist() == [0, 2, 2, 5]
    assert ops.cu_seqlens_from_lengths([]).tolist() == [0]
    assert ops.cu_seqlens_from_lengths(torch.empty(0, dtype=torch.int64)).tolist() == [0]


def test_masks() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    for form in (mask, mask.bool(), mask.float()):
        assert ops.cu_seqlens_from_mask(form).tolist() == [0, 2, 2, 5]
    gaps = torch.tensor([[True, False, True], [False, True, False]])
    assert ops.token_indices_from_mask(gaps).tolist() == [0, 2, 4]
    assert ops.token_indices_from_mask(gaps, total=3).tolist() == [0, 2, 4]


def test_position_ids() -> None:
    cu_seqlens = ops.cu_seqlens_from_lengths([2, 0, 3])
    for total in (None, 5):
        assert ops.position_ids_from_cu_seqlens(cu_seqlens, total=total).tolist() == [0, 1, 0, 1, 2]
    assert ops.position_ids_from_cu_seqlens(ops.cu_seqlens_from_lengths([])).tolist() == []


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 0, 7], [513, 0, 1, 300, 0]])
def test_position_ids_on_a_gpu(lengths: list[int]) -> None:
    expected = [index for length in lengths for index in range(length)]
    cu_seqlens = ops.cu_seqlens_from_lengths(lengths, device="cuda")
    for total in (None, sum(lengths)):
        assert ops.position_ids_from_cu_seqlens(cu_seqlens, total=total).tolist() == expected
    after = ops.position_ids_from_cu_seqlens(cu_seqlens, total=sum(lengths) + 2)[: sum(lengths)]
    assert after.tolist() == expected


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ops.cu_seqlens_from_lengths([1, -2]), ValueError),
        (lambda: ops.cu_seqlens_from_lengths(torch.tensor([1, -2])), ValueError),
        (lambda: ops.cu_seqlens_from_lengths([2**32 + 3]), ValueError),
        (lambda: ops.cu_seqlens_from_lengths(torch.tensor([2**31, 2**31 + 3])), ValueError),
        (lambda: ops.cu_seqlens_from_lengths([1.0]), TypeError),
        (lambda: ops.cu_seqlens_from_lengths(torch.ones(3)), TypeError),
        (lambda: ops.cu_seqlens_from_lengths(torch.ones(3, 2, dtype=torch.int64)), ValueError),
        (lambda: ops.cu_seqlens_from_mask(torch.ones(3)), ValueError),
        (lambda: ops.cu_seqlens_from_mask([[1]]), TypeError),
        (lambda: ops.token_indices_from_mask(torch.ones(2, 2, 2)), ValueError),
        (lambda: ops.position_ids_from_cu_seqlens(torch.tensor([0, 1])), TypeError),
        (lambda: ops.position_ids_from_cu_seqlens(torch.tensor([0, 3, 1, 5], dtype=torch.int32)), ValueError),
        (lambda: ops.position_ids_from_cu_seqlens(torch.tensor([0, 5], dtype=torch.int32), total=4), ValueError),
        (lambda: ops.pack(torch.ones(2, 3), lengths=[1, 4]), ValueError),
        (lambda: ops.pack(torch.ones(1, 3), lengths=torch.tensor([2**32 + 3])), ValueError),
        (lambda: ops.pack(torch.ones(2, 3), lengths=[1, 2, 3]), ValueError),
    ],
)
def test_bad_calls_of_helpers(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"\w+: \w+: expected .*, got "):
        call()


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=interpreted),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("lengths", "longest", "total"),
    [([2, 0, 3], 3, 40), ([2, 9, 3], 4, 14), ([600, 9, 3], 4, 700), ([1, 2], 0, 5), ([], 3, 5), ([7], 7, 7)],
)
def test_every_packed_row_is_written(lengths: list[int], longest: int, total: int, device: str) -> None:
    """The gradient of unpack: also if T is more than B * S, and for tokens that do not fit into the padded batch."""
    from fasttfm.kernels.pack import reference, triton

    x = torch.randn(len(lengths), longest, 5, device=device)
    cu_seqlens = ops.cu_seqlens_from_lengths(lengths, device=device)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        packed = triton.pack_triton(x, cu_seqlens, total)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(packed, reference.pack(x, cu_seqlens, total))


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=interpreted),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("columns", [5, 136])
def test_means_of_sequences(columns: int, skipped: int, device: str) -> None:
    """Sequences longer than a tile, without tokens, and with only skipped ones; boundaries beyond the rows of x."""
    from fasttfm.kernels.pack.triton_mean import sequence_means_triton

    lengths = [3, 0, 150, 1, 2, 64, 9]
    x = torch.randn(sum(lengths) - 4, 2 * columns, device=device)[:, :columns]
    cu_seqlens = ops.cu_seqlens_from_lengths(lengths, device=device)
    found = sequence_means_triton(x, cu_seqlens, skipped)
    assert found.shape == (7, columns)
    for mean, part in zip(found, x.double().tensor_split(cu_seqlens[1:-1].tolist()), strict=True):
        expected = part[skipped:].mean(0) if len(part) > skipped else torch.zeros_like(part.sum(0))
        assert (mean - expected).abs().max() <= 64 * torch.finfo(torch.float32).eps  # sums of up to 150 numbers
        alone = sequence_means_triton(part.float(), ops.cu_seqlens_from_lengths([len(part)], device=device), skipped)
        assert torch.equal(mean, alone[0])  # whatever else is in the batch


def test_means_of_sequences_have_a_gradient() -> None:
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    found = sequence_means(x, cu_seqlens, 4, skipped=1)
    expected = torch.stack([x[1:4].mean(0), x[:0].sum(0), x[5:].mean(0)])
    assert torch.allclose(found.double(), expected, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.allclose(gradient, torch.autograd.grad(expected.sum(), x)[0], atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [262_140, 262_144])
def test_a_sequence_of_many_blocks(tokens: int) -> None:
    """A grid has up to 65,535 programs along y and z."""
    x = torch.randn(1, tokens, 1024, device="cuda").bfloat16()
    packed = ops.pack(x, lengths=[tokens], backend="triton")
    assert torch.equal(packed, x[0])
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    assert torch.equal(ops.unpack(packed, cu_seqlens, tokens, backend="triton"), x)
