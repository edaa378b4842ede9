"""AdamW against torch's and its formula: on a CPU, with a Python model of the kernel that reads its table, and on a
GPU."""

from __future__ import annotations

import copy
import ctypes
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fasttfm import _C, _native, optim
from fasttfm.ops.core import weight_copies
from fasttfm.optim import AdamW, cpu_norm
from fasttfm.testing.tolerance import GRADIENT_FACTOR, compare

OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
# Several chunks, odd sizes, an empty tensor.
SIZES = (1, 3, 4, 5, 0, 1023, 16384, 16385, 65536 * 2 + 7, 40000, 2, 0, *range(1000, 1300))
GPU = pytest.mark.gpu


def made(sizes: tuple[int, ...], device: str = "cpu", seed: int = 0) -> list[nn.Parameter]:
    """Parameters, some of them views at any offset."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(size + 3, generator=generator).to(device) for size in sizes]
    starts = [index % 3 if index % 5 == 0 else 0 for index in range(len(sizes))]
    return [nn.Parameter(each[start : start + size]) for each, start, size in zip(whole, starts, sizes, strict=True)]


def gradients_of(parameters: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(each.shape, generator=generator).to(each.device) for each in parameters]


def in_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 0.01, "eps": 1e-4}]


def run(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int, clip: float | None = None
) -> None:
    for step in range(steps):
        for each, gradient in zip(parameters, gradients_of(parameters, step), strict=True):
            each.grad = gradient.to(each.dtype)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()


def check(ours: list[nn.Parameter], optimizer: AdamW, steps: int, clip: float | None = None) -> None:
    """Parameters and moments after some steps from ``made``'s, against torch's in fp32 and in fp64."""
    runs = []
    for dtype in (torch.float32, torch.float64):
        parameters = [nn.Parameter(each.detach().to(dtype)) for each in made(SIZES, str(ours[0].device))]
        runs.append((parameters, torch.optim.AdamW(in_groups(parameters), **OPTIONS, foreach=False)))
        run(runs[-1][1], parameters, steps, clip)
    found = [(ours, optimizer), *runs]
    for name in ("parameter", "exp_avg", "exp_avg_sq"):
        out, naive, exact = (
            torch.cat([(each if name == "parameter" else states.state[each][name]).detach() for each in parameters])
            for parameters, states in found
        )
        comparison = compare(name, out, naive, exact, GRADIENT_FACTOR)
        assert comparison.ok, comparison
    assert all(optimizer.state[each]["step"] == steps for each in ours)


# ---- on a CPU --------------------------------------------------------------------------------------------------------


def test_a_cpu_uses_the_step_of_torch() -> None:
    ours, theirs = made(SIZES[:8]), made(SIZES[:8])
    optimizer, other = AdamW(in_groups(ours), **OPTIONS), torch.optim.AdamW(in_groups(theirs), **OPTIONS, fused=True)
    run(optimizer, ours, 4)
    run(other, theirs, 4)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert optimizer.step(lambda: 7) == 7
    assert optimizer.last_norm is None


def test_clipping_on_a_cpu() -> None:
    ours = made(SIZES)
    optimizer = AdamW(in_groups(ours), **OPTIONS, max_norm=0.5)
    run(optimizer, ours, 3)
    check(ours, optimizer, 3, clip=0.5)
    norm = torch.cat([each.flatten() for each in gradients_of(ours, 2)]).double().norm()
    assert optimizer.last_norm is not None
    assert optimizer.last_norm.item() == pytest.approx(norm.item(), rel=1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("to_ours", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_states_are_exchanged_with_torchs_optimizer(device: str, to_ours: bool, fused: bool) -> None:
    sizes = SIZES[:9]
    makers: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.AdamW(in_groups(parameters), **OPTIONS, fused=fused),
        lambda parameters: AdamW(in_groups(parameters), **OPTIONS),
    ]
    first, second = makers if to_ours else makers[::-1]
    parameters = made(sizes, device)
    before = first(parameters)
    run(before, parameters, 3)
    moved = [nn.Parameter(each.detach().clone()) for each in parameters]
    after = second(moved)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert before.state_dict()["state"].keys() == after.state_dict()["state"].keys()
    run(before, parameters, 1)
    run(after, moved, 1)
    for one, other in zip(parameters, moved, strict=True):
        torch.testing.assert_close(one, other)
        assert after.state[other]["step"] == 4


def test_copies_of_an_optimizer_keep_its_options() -> None:
    optimizer = AdamW(made((4,)), **OPTIONS, max_norm=3.0, weight_copies=True)
    for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (each.max_norm, each.weight_copies) == (3.0, True)
        assert each.param_groups[0]["eps"] == OPTIONS["eps"]
    copy.deepcopy(AdamW(made((4,)))).refresh_copies()


def test_gradients_are_released_or_zeroed() -> None:
    parameters = made((4, 5))
    optimizer = AdamW(in_groups(parameters), **OPTIONS)
    for each in parameters:
        each.grad = torch.ones_like(each)
    kept = [each.grad for each in parameters]
    optimizer.zero_grad(set_to_none=False)
    assert all(each.grad is grad and not grad.any() for each, grad in zip(parameters, kept, strict=True))
    optimizer.zero_grad()
    assert [each.grad for each in parameters] == [None, None]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="max_norm: expected a number above 0 or None, got 0"):
        AdamW(made((4,)), max_norm=0.0)
    theirs = torch.optim.AdamW(made((4,)), amsgrad=True)
    optimizer = AdamW(made((4,)))
    optimizer.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="amsgrad: expected False, got True"):
        run(optimizer, optimizer.param_groups[0]["params"], 1)
    if not torch.cuda.is_available():
        assert optim.refusal(made((4,))) is not None


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_has_the_kernels_rows() -> None:
    assert optim.TENSOR.itemsize == _C.adamw_tensor_bytes
    assert optim.GROUP.itemsize == _C.adamw_group_bytes


class Model:
    """A model of the kernel for addresses in host memory."""

    adamw_chunk = 16384
    tensor_table = staticmethod(_C.tensor_table)

    def adamw_workspace_cuda(self, tensors: int, groups: int) -> int:
        return 1

    def adamw_cuda(self, table: int, count: int, group_count: int, chunk_count: int, *rest: Any) -> None:
        starts = memory(table, count, torch.int32)
        offset = table + (count + 1) // 2 * 8
        tensors = rows(offset, count, optim.TENSOR)
        groups = rows(offset + tensors.nbytes, group_count, optim.GROUP)
        chunks = 0
        for start, row in zip(starts.tolist(), tensors, strict=True):
            assert start == chunks
            chunks += -(-int(row["size"]) // self.adamw_chunk)
            self._update(row, groups[row["group"]])
        assert chunks == chunk_count

    def _update(self, row: Any, group: Any) -> None:
        size = int(row["size"])
        p, m, v = (memory(row[name], size, torch.float32) for name in ("parameter", "exp_avg", "exp_avg_sq"))
        types = {code: dtype for dtype, code in _native.DTYPE_CODES.items()}
        g = memory(row["gradient"], size, types[row["gradient_dtype"]]).double()
        t = memory(row["step"], 1, torch.float32).add_(1)
        m.lerp_(g.float(), 1 - group["beta1"])
        v.mul_(group["beta2"]).add_((1 - group["beta2"]) * g * g)
        change = (m / (1 - group["beta1"] ** t)) / ((v / (1 - group["beta2"] ** t)).sqrt() + group["epsilon"])
        p.sub_(group["learning_rate"] * (group["weight_decay"] * p + change))
        if row["copy"]:
            memory(row["copy"], size, types[row["copy_dtype"]]).copy_(p)


def memory(address: int, size: int, dtype: torch.dtype) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=dtype)
    block = (ctypes.c_char * (size * dtype.itemsize)).from_address(int(address))
    return torch.frombuffer(block, dtype=dtype)


def rows(address: int, count: int, dtype: np.dtype) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)).view(dtype)


@pytest.fixture
def model_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "core", Model)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(optim, "refusal", lambda _: None)
    monkeypatch.setattr(AdamW, "_step_cpu", AdamW._step_gpu)


@pytest.mark.usefixtures("model_of_the_kernel")
def test_the_table_describes_the_whole_step() -> None:
    ours = made(SIZES)
    optimizer = AdamW(in_groups(ours), **OPTIONS)
    versions = [each._version for each in ours]
    run(optimizer, ours, 3)
    check(ours, optimizer, 3)
    assert [each._version for each in ours] == [version + 3 for version in versions]


@pytest.mark.usefixtures("model_of_the_kernel")
def test_a_step_writes_the_copies_that_forwards_request() -> None:
    wanted, other = parameters = made((40, 50))
    optimizer = AdamW(parameters, **OPTIONS, weight_copies=True)
    assert weight_copies.copies_of([wanted], torch.bfloat16)[0] is None
    for _ in range(2):
        run(optimizer, parameters, 1)
        found = weight_copies.copies_of([wanted], torch.bfloat16)[0]
        assert found is not None
        assert torch.equal(found, wanted.bfloat16())
    assert weight_copies.copies_of([other], torch.bfloat16)[0] is None
    nn.init.zeros_(wanted)
    assert weight_copies.copies_of([wanted], torch.bfloat16)[0] is None
    optimizer.refresh_copies()
    assert weight_copies.copies_of([wanted], torch.bfloat16)[0] is found
    assert found is not None
    assert found.count_nonzero() == 0


@pytest.mark.usefixtures("model_of_the_kernel")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda o, p: setattr(p, "grad", torch.ones(4).to_sparse()), "gradient: expected a dense tensor"),
        (
            lambda o, p: o.state[p].update(exp_avg=torch.ones(4).double()),
            "exp_avg: expected contiguous fp32 numbers on cpu",
        ),
        (lambda o, p: o.state[p].update(exp_avg_sq=torch.ones(3)), "exp_avg_sq: expected 4 numbers, got 3"),
        (lambda o, p: o.param_groups[0].update(maximize=True), "maximize: expected False"),
    ],
)
def test_what_the_kernel_does_not_support_is_refused(change: Callable[[AdamW, Tensor], None], sentence: str) -> None:
    (parameter,) = parameters = made((4,))
    optimizer = AdamW(parameters, **OPTIONS)
    run(optimizer, parameters, 1)
    change(optimizer, parameter)
    with pytest.raises(ValueError, match=sentence):
        optimizer.step()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("max_norm", [1.0, float("inf")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_a_norm_that_is_not_finite_changes_nothing(bad: float, max_norm: float, device: str) -> None:
    """If ``found_inf`` is given."""
    parameters = made((40, 5, 20000), device)
    before = [each.detach().clone() for each in parameters]
    for each, gradient in zip(parameters, gradients_of(parameters, 0), strict=True):
        each.grad = gradient
    parameters[0].grad[7] = bad  # type: ignore[index]
    optimizer = AdamW(parameters, **OPTIONS, max_norm=max_norm)
    optimizer.found_inf = torch.tensor(0.0, device=device)  # type: ignore[attr-defined]
    optimizer.step()
    finite = bad == 1.0
    assert optimizer.last_norm is not None
    assert bool(optimizer.last_norm.isfinite()) == finite
    assert all(torch.equal(a, b) != finite for a, b in zip(parameters, before, strict=True))
    assert all(float(state["step"]) == finite for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("scale", "dtype", "shape"),
    [
        (1e-3, torch.float32, (3, 700_001)),
        (1e25, torch.float32, (40, 8)),
        (1e-30, torch.float32, (40, 8)),
        (0.0, torch.float32, (40, 8)),
        (1.0, torch.bfloat16, (40, 8)),
    ],
)
def test_the_norm_on_a_cpu(scale: float, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape).mul(scale).to(dtype), torch.randn(17).mul(scale).to(dtype)]
    gradients.append(gradients[0].t())
    for some in (gradients, gradients[:2]):
        exact = torch.cat([each.flatten().double() for each in some]).norm().item()
        assert cpu_norm(some).item() == pytest.approx(exact, rel=1e-6)
    assert not cpu_norm([torch.tensor([1.0, math.inf]), gradients[1].float()]).isfinite()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_last_norm_is_that_of_unscaled_gradients(device: str) -> None:
    (parameter,) = parameters = made((40,), device)
    optimizer = AdamW(parameters, **OPTIONS, max_norm=0.5)
    gradient = gradients_of(parameters, 0)[0]
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    scaler.scale((parameter * gradient).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.last_norm is not None
    assert optimizer.last_norm.item() == pytest.approx(gradient.norm().item(), rel=1e-6)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_a_step_on_a_gpu(clip: float | None) -> None:
    results = []
    for _ in range(2):
        ours = made(SIZES, "cuda")
        optimizer = AdamW(in_groups(ours), **OPTIONS, max_norm=clip)
        run(optimizer, ours, 3)
        results.append([each.detach() for each in ours])
    check(ours, optimizer, 3, clip)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    whole = torch.cat([each.flatten() for each in gradients_of(ours, 2)]).double()
    assert optimizer.gradient_norm().item() == pytest.approx(whole.norm().item(), rel=1e-6)


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_on_a_gpu(dtype: torch.dtype) -> None:
    if not hasattr(Tensor, "grad_dtype"):
        pytest.skip("this torch has no gradients of another type than the parameter's")
    pairs = []
    for narrow in (True, False):
        parameters = made(SIZES, "cuda")
        optimizer = AdamW(parameters, **OPTIONS)
        for each, gradient in zip(parameters, gradients_of(parameters, 0), strict=True):
            if narrow:
                each.grad_dtype = dtype
            each.grad = gradient.to(dtype) if narrow else gradient.to(dtype).float()
        pairs.append((parameters, optimizer.gradient_norm()))
        optimizer.step()
    assert pairs[0][1] == pairs[1][1]
    assert all(torch.equal(a, b) for a, b in zip(pairs[0][0], pairs[1][0], strict=True))


@GPU
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_propagate_as_in_torch(bad: float, clip: float | None) -> None:
    found = []
    for ours in (True, False):
        parameters = made((40, 5, 20000), "cuda")
        for each, gradient in zip(parameters, gradients_of(parameters, 0), strict=True):
            each.grad = gradient
        parameters[0].grad[7] = bad  # type: ignore[index]
        if ours:
            AdamW(parameters, **OPTIONS, max_norm=clip).step()
        else:
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            torch.optim.AdamW(parameters, **OPTIONS, fused=True).step()
        found.append([each.detach().isfinite() for each in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not found[0][0].all()


@GPU
def test_grad_scale_and_found_inf_are_used() -> None:
    ours, theirs = made(SIZES, "cuda"), made(SIZES, "cuda")
    pairs = [(AdamW(ours, **OPTIONS), ours), (torch.optim.AdamW(theirs, **OPTIONS, fused=True), theirs)]
    for step, bad in enumerate((0.0, 1.0, 0.0)):
        for optimizer, parameters in pairs:
            optimizer.grad_scale = torch.tensor(8.0, device="cuda")  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(bad, device="cuda")  # type: ignore[attr-defined]
            for each, gradient in zip(parameters, gradients_of(parameters, step), strict=True):
                each.grad = gradient * 8
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        assert pairs[0][0].state[one]["step"] == 2


@GPU
def test_a_step_can_be_captured() -> None:
    """With a learning rate on the device, clipping and copies; replays continue from parameters that were changed."""
    results = []
    for graphed in (False, True):
        parameters = made((5000, 70), "cuda")
        rate = torch.tensor(0.01, device="cuda")
        optimizer = AdamW(parameters, **{**OPTIONS, "lr": rate}, max_norm=0.5, weight_copies=True, capturable=True)
        weight_copies.copies_of([parameters[0]], torch.bfloat16)[0]
        static = gradients_of(parameters, 0)
        for each, gradient in zip(parameters, static, strict=True):
            each.grad = gradient
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                optimizer.step()
        for step in range(1, 5):
            rate.fill_(0.01 * step)
            for held, gradient in zip(static, gradients_of(parameters, step), strict=True):
                held.copy_(gradient)
            if step == 3:
                nn.init.ones_(parameters[0])
            optimizer.refresh_copies()
            graph.replay() if graphed else optimizer.step()
            found = weight_copies.copies_of([parameters[0]], torch.bfloat16)[0]
            assert found is not None
            assert torch.equal(found, parameters[0].bfloat16())
        results.append([each.detach().clone() for each in parameters])
        # A parameter that the graph does not update loses its copy.
        assert weight_copies.copies_of([parameters[1]], torch.bfloat16)[0] is None
        optimizer.step()
        assert (weight_copies.copies_of([parameters[1]], torch.bfloat16)[0] is None) == graphed
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- layouts on a CPU ------------------------------------------------------------------------------------------------


def _transposed() -> Tensor:
    return torch.randn(5, 3).t()


def _with_gaps() -> Tensor:
    return torch.randn(3, 9)[:, :5]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("gradient", [_transposed, _with_gaps, lambda: torch.randn(3, 1).expand(3, 5)])
@pytest.mark.parametrize("parameter", [lambda: torch.randn(3, 5), _transposed, _with_gaps])
def test_every_memory_layout(
    parameter: Callable[[], Tensor], gradient: Callable[[], Tensor], clip: float | None
) -> None:
    """torch's fused step on a CPU processes elements in memory order."""
    torch.manual_seed(0)
    ours = nn.Parameter(parameter())
    theirs = nn.Parameter(ours.detach().clone(memory_format=torch.contiguous_format))
    around = torch.as_strided(ours.detach(), (ours.untyped_storage().size() // 4,), (1,), 0)
    inside = torch.zeros_like(around, dtype=torch.bool)
    torch.as_strided(inside, ours.shape, ours.stride(), 0).fill_(True)
    outside = around[~inside].clone()
    optimizer, peer = AdamW([ours], **OPTIONS, max_norm=clip), torch.optim.AdamW([theirs], **OPTIONS)
    for _ in range(3):
        ours.grad = gradient()
        theirs.grad = ours.grad.contiguous().clone()
        if clip is not None:
            nn.utils.clip_grad_norm_([theirs], clip)
        optimizer.step()
        peer.step()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.allclose(optimizer.state[ours]["exp_avg"], peer.state[theirs]["exp_avg"], rtol=1e-5, atol=1e-6)
    assert torch.equal(around[~inside], outside)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_sparse_and_complex_gradients_are_refused(clip: float | None) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    rotation = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    rotation.grad = torch.ones_like(rotation)
    for parameter, got in ((table.weight, "torch.sparse_coo"), (rotation, "torch.complex64")):
        with pytest.raises(ValueError, match=f"expected dense gradients of real numbers, got one of {got}"):
            AdamW([parameter], max_norm=clip).step()
