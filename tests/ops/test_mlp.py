import pytest
import torch

from fasttfm.ops import gelu_gemm, linear_gelu, mlp
from fasttfm.testing.harness import same_bits
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.mlp import SPEC

TestMlp = op_tests(SPEC)

SHAPES = {"x": (3, 5, 16), "w1": (40, 16), "b1": (40,), "w2": (16, 40), "b2": (16,)}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: (0.5 * torch.randn(shape)).to(dtype).requires_grad_() for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [True, False])
def test_saves_input_parameters_and_pre_activation(dtype: torch.dtype, recompute: bool) -> None:
    given = tensors(dtype)
    inner = 15 * 40 * dtype.itemsize
    parameters = sum(given[name].nbytes for name in ("w1", "b1", "w2"))
    expected = given["x"].nbytes + parameters + inner * (1 if recompute else 2)
    assert saved_bytes(lambda: mlp(**given, recompute=recompute)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputing_changes_no_bit(dtype: torch.dtype) -> None:
    results = []
    for recompute in (True, False):
        given = tensors(dtype)
        y = mlp(**given, recompute=recompute)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), list(given.values()))])
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


def test_a_kept_derivative_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for kept in (gelu_gemm.PRODUCT, gelu_gemm.DERIVATIVE):
        monkeypatch.setattr(gelu_gemm, "kept_beside", lambda *_, kept=kept: kept)
        given = tensors(torch.float64)
        y = mlp(**given, backend="torch")
        results.append([y, *torch.autograd.grad(y.square().sum(), list(given.values()))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wanted", SHAPES)
def test_each_gradient_by_itself(wanted: str) -> None:
    given = tensors()
    everything = torch.autograd.grad(mlp(**given).square().sum(), list(given.values()))
    alone = {name: value.detach().requires_grad_(name == wanted) for name, value in given.items()}
    (found,) = torch.autograd.grad(mlp(**alone).square().sum(), alone[wanted])
    assert same_bits(found, everything[list(SHAPES).index(wanted)])


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    """Under autocast the op gives the results for tensors that are cast before; gradients have the original types."""
    given = tensors()
    cast = {name: value.detach().to(dtype).requires_grad_() for name, value in given.items()}
    with torch.autocast("cpu", dtype):
        y = mlp(**given, backend=backend)
        first = linear_gelu(given["x"], given["w1"], given["b1"], backend=backend)
    expected = mlp(**cast, backend=backend)
    assert same_bits(y, expected)
    assert same_bits(first, linear_gelu(cast["x"], cast["w1"], cast["b1"], backend=backend))
    found = torch.autograd.grad(y.float().square().sum(), list(given.values()))
    wanted = torch.autograd.grad(expected.float().square().sum(), list(cast.values()))
    assert all(same_bits(one, other.float()) for one, other in zip(found, wanted, strict=True))


def test_autocast_keeps_fp64() -> None:
    given = tensors(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(**given).dtype == torch.float64


def test_autocast_compiles() -> None:
    given = tensors()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mlp(**given)

    assert same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(), step())
