from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fasttfm.kernels.common import philox
from fasttfm.ops import dropout_add_layer_norm, layer_norm
from fasttfm.testing.harness import same_bits
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.specs.dropout_add_layer_norm import SPEC
from fasttfm.testing.tolerance import GRADIENT_FACTOR, compare

TestDropoutAddLayerNorm = op_tests(SPEC)

BACKENDS = [
    ("cpu", "cpu"),
    ("reference", "cpu"),
    pytest.param("triton", "cpu", marks=interpreted),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
]
LENGTHS = (7, 1, 0, 12)


def seed_of(number: int, device: str = "cpu") -> Tensor:
    return torch.tensor([number], device=device)


def starts_of(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)


def dropped_sum(shape: tuple[int, ...], device: str = "cpu", **options: Any) -> Tensor:
    """dropout(1) as the op computes it: z with ones for x and zeros for the residual."""
    ones = torch.ones(shape, device=device)
    result = dropout_add_layer_norm(ones, torch.zeros_like(ones), prenorm=True, **options)
    assert isinstance(result, tuple)
    return result[1]


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("columns", [8, 104, 744, 1024, 2048])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize("p", [0.1, 1 / 256, 255 / 256])
def test_every_backend_draws_the_same_mask(
    backend: str, device: str, columns: int, lengths: tuple[int, ...] | None, p: float
) -> None:
    shape = (4, 5, columns) if lengths is None else (sum(lengths), columns)
    starts = None if lengths is None else starts_of(lengths, device)
    seed = seed_of(-(2**62) - 12345, device)
    found = dropped_sum(shape, device, p=p, seed=seed, cu_seqlens=starts, backend=backend)
    threshold = philox.threshold(p)
    positions = philox.row_positions(torch.Size(shape), starts, seed.device)
    kept = philox.kept(seed, *positions, columns, threshold)
    assert torch.equal(found.reshape(-1, columns), kept * torch.tensor(philox.scale(threshold), device=device))


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_backward_drops_what_forward_dropped(backend: str, device: str) -> None:
    x = torch.ones(3, 9, 72, device=device, requires_grad=True)
    residual = torch.zeros_like(x, requires_grad=True)
    seed = seed_of(3, device)
    y, z = dropout_add_layer_norm(x, residual, p=0.3, prenorm=True, seed=seed, backend=backend)
    dx, dresidual = torch.autograd.grad((y, z), (x, residual), (torch.randn_like(y), torch.full_like(z, 100.0)))
    assert (dresidual != 0).all()
    assert torch.equal(dx != 0, z != 0)
    assert torch.equal(dx, dresidual * z)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_packed_and_padded_batches_give_the_same_rows(backend: str, device: str) -> None:
    columns, longest = 48, max(LENGTHS)
    padded = torch.randn(2, len(LENGTHS), longest, columns, device=device)
    present = torch.arange(longest)[None, :] < torch.tensor(LENGTHS)[:, None]
    options = {"p": 0.4, "seed": seed_of(9, device), "backend": backend}
    expected = dropout_add_layer_norm(*padded, **options)[present]
    packed = padded[:, present]
    assert same_bits(expected, dropout_add_layer_norm(*packed, cu_seqlens=starts_of(LENGTHS, device), **options))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("starts", [(1, 20), (0, 12, 7, 20), (0, 19), (0, 21), (-1, 20)])
def test_invalid_boundaries(p: float, starts: tuple[int, ...]) -> None:
    x, cu_seqlens = torch.ones(20, 8), torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^dropout_add_layer_norm: cu_seqlens: expected values .*, got "):
        dropout_add_layer_norm(x, x, p=p, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kept_fraction_and_the_scale(p: float) -> None:
    found = dropped_sum((64, 32, 256), p=p, seed=seed_of(17))
    kept = 1 - philox.threshold(p) / 256
    assert abs(kept - (1 - p)) <= 1 / 512
    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / kept).item()}
    assert_frequency(found != 0, kept)
    for other in (dropped_sum((64, 32, 256), p=p, seed=seed_of(18)), found.roll(1, 0), found.roll(1, 1)):
        assert_frequency((other != 0) == (found != 0), kept**2 + (1 - kept) ** 2)  # independent of each other


def assert_frequency(events: Tensor, probability: float) -> None:
    """The frequency is within 8 standard deviations of that of independent events with this probability."""
    deviation = (probability * (1 - probability) / events.numel()) ** 0.5
    assert abs(events.double().mean().item() - probability) < 8 * deviation


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_without_dropout_it_is_layer_norm_of_the_sum(backend: str, device: str) -> None:
    x, residual, dy = torch.randn(3, 4, 6, 40, device=device)
    weight, bias = torch.randn(2, 40, device=device)

    def run(function: Callable[..., Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (x.clone(), residual.clone(), weight, bias)]
        y = function(*inputs)
        return (y, *torch.autograd.grad(y, inputs, dy.to(dtype)))

    def composed(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x + residual, weight, bias, backend="reference")

    fused = run(partial(dropout_add_layer_norm, backend=backend), torch.float32)
    for out, naive, exact in zip(fused, run(composed, torch.float32), run(composed, torch.float64), strict=True):
        assert compare("result", out, naive, exact, GRADIENT_FACTOR).ok
    assert same_bits(fused[1], fused[2])  # dx and dresidual


def test_gradients_of_x_and_residual_may_share_memory_but_not_accumulation() -> None:
    x, residual = torch.randn(2, 5, 32).unbind()
    x.requires_grad_(), residual.requires_grad_()
    for _ in range(2):
        dropout_add_layer_norm(x, residual).square().sum().backward()
    once = torch.autograd.grad(dropout_add_layer_norm(x, residual).square().sum(), x)[0]
    assert torch.equal(x.grad, 2 * once)
    assert torch.equal(residual.grad, 2 * once)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_everything_dropped_leaves_the_residual(backend: str, device: str) -> None:
    x = torch.full((3, 40), float("nan"), device=device, requires_grad=True)
    residual = torch.randn(3, 40, device=device)
    y, z = dropout_add_layer_norm(x, residual, p=1.0, prenorm=True, backend=backend)
    assert torch.equal(z, residual)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert torch.equal(dx, torch.zeros_like(dx))


def test_manual_seed_reproduces() -> None:
    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.stack([dropped_sum((4, 64), p=0.5) for _ in range(2)])

    first = run(1)
    assert torch.equal(first, run(1))
    assert not torch.equal(first, run(2))
    assert not torch.equal(first[0], first[1])


def test_evaluation_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    dropped_sum((4, 64), p=0.0)
    dropped_sum((4, 64), p=0.5, seed=seed_of(1))
    assert torch.equal(state, torch.get_rng_state())


def test_compiled_without_a_seed_follows_torchs_generator() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dropped_sum, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    first, second = compiled((4, 64), p=0.5), compiled((4, 64), p=0.5)
    assert 0 < (first != 0).sum() < first.numel()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(first, compiled((4, 64), p=0.5))


def test_checkpointed_gradients_are_the_same() -> None:
    x, residual = torch.randn(2, 6, 64).unbind()
    weight = torch.randn(64)

    def gradients(checkpointed: bool) -> tuple[Tensor, ...]:
        inputs = [tensor.clone().requires_grad_() for tensor in (x, residual, weight)]
        torch.manual_seed(3)

        def block(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
            return dropout_add_layer_norm(x, residual, weight, p=0.3)

        y = checkpoint(block, *inputs, use_reentrant=False) if checkpointed else block(*inputs)
        return torch.autograd.grad(y.square().sum(), inputs)

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert same_bits(plain, again)


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
def test_saved_for_backward(prenorm: bool, residual_dtype: torch.dtype) -> None:
    """The sum, the statistics, the parameters and the seed; no mask, and neither x nor the residual."""
    rows, columns = 48, 64
    x = torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(rows, columns, dtype=residual_dtype, requires_grad=True)
    parameters = [torch.randn(columns, requires_grad=True) for _ in range(3)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        dropout_add_layer_norm(x, residual, *parameters[:2], linear_bias=parameters[2], p=0.1, prenorm=prenorm)
    shared = {parameter.data_ptr() for parameter in parameters}
    own = [tensor for tensor in saved if tensor.data_ptr() not in shared]
    assert {x.data_ptr(), residual.data_ptr()}.isdisjoint(tensor.data_ptr() for tensor in own)
    expected = rows * columns * residual_dtype.itemsize + 2 * rows * 4 + 8  # z, statistics, seed
    assert sum(tensor.nbytes for tensor in own) == expected
