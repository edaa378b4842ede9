import pytest
import torch
from torch import Tensor

from fasttfm import explain, use_backend
from fasttfm.kernels.qkv_projection import reference
from fasttfm.ops import fuse_qkv, layer_norm, qkv_projection, rotary
from fasttfm.ops.core.backends import BackendRefused
from fasttfm.ops.core.backends import tables as tables_of_backends
from fasttfm.testing.harness import same_bits
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.qkv_projection import SPEC
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare

TestQkvProjection = op_tests(SPEC)

C, H = 16, 4


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.5 * torch.randn(shape)).to(dtype).requires_grad_()


@pytest.mark.parametrize("shape", [(3, 5, C), (15, C)], ids=["dense", "packed"])
def test_the_layout_is_that_of_attention(shape: tuple[int, ...]) -> None:
    """q, k and v are views of one contiguous result, which is not a view, so that users may change it in place."""
    qkv = qkv_projection(random(*shape), random(3 * C, C), random(3 * C), H)
    assert qkv.shape == (*shape[:-1], 3, H, C // H)
    assert qkv.is_contiguous()
    assert not qkv._is_view()
    for index, part in enumerate(qkv.unbind(-3)):
        assert part.stride()[-3:] == (3 * C, C // H, 1)
        assert part.data_ptr() == qkv.data_ptr() + index * C * qkv.itemsize
    qkv.mul_(2.0).sum().backward()


def test_three_weights_equal_the_fused_one() -> None:
    torch.manual_seed(0)
    x, weights, biases = random(7, C), [random(C, C) for _ in range(3)], [random(C) for _ in range(3)]
    weight, bias = (value.detach().requires_grad_() for value in fuse_qkv(*weights, *biases))
    separate, fused = qkv_projection(x, weights, biases, H), qkv_projection(x, weight, bias, H)
    assert same_bits(separate, fused)
    gradient = torch.randn_like(fused)
    dx, *found = torch.autograd.grad(separate, [x, *weights, *biases], gradient)
    fused_dx, dweight, dbias = torch.autograd.grad(fused, [x, weight, bias], gradient)
    assert same_bits(dx, fused_dx)
    assert same_bits(torch.cat(found[:3]), dweight)
    assert same_bits(torch.cat(found[3:]), dbias)


def test_three_weights_are_q_k_and_v_in_this_order() -> None:
    x, weights = torch.randn(7, C), [torch.randn(C, C) for _ in range(3)]
    qkv = qkv_projection(x, weights, None, H)
    for part, weight in zip(qkv.unbind(-3), weights, strict=True):
        torch.testing.assert_close(part.flatten(-2), x @ weight.t())


def test_a_missing_bias_is_zero() -> None:
    weights = [torch.randn(C, C) for _ in range(3)]
    assert fuse_qkv(*weights)[1] is None
    bias = fuse_qkv(*weights, torch.ones(C), None, torch.ones(C))[1]
    assert torch.equal(bias, torch.cat([torch.ones(C), torch.zeros(C), torch.ones(C)]))


@pytest.mark.parametrize(
    ("position", "value", "argument"),
    [
        (1, torch.ones(C, C + 1), "k_weight"),
        (2, torch.ones(C), "v_weight"),
        (3, torch.ones(C + 1), "q_bias"),
        (5, 1.0, "v_bias"),
    ],
)
def test_fuse_qkv_refuses_weights_that_do_not_fit(position: int, value: object, argument: str) -> None:
    arguments: list[object] = [*(torch.ones(C, C) for _ in range(3)), *(torch.ones(C) for _ in range(3))]
    arguments[position] = value
    with pytest.raises((TypeError, ValueError), match=f"fuse_qkv: {argument}: expected .*, got "):
        fuse_qkv(*arguments)  # type: ignore[arg-type]


def test_fused_layer_norm_matches_layer_norm() -> None:
    x, norm = torch.randn(7, C), (torch.randn(C), torch.randn(C), 1e-3)
    weight, bias = torch.randn(3 * C, C), torch.randn(3 * C)
    folded = qkv_projection(x, weight, bias, H, layer_norm=norm)
    assert same_bits(folded, qkv_projection(layer_norm(x, norm[0], norm[1], eps=norm[2]), weight, bias, H))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saves_input_and_weight(dtype: torch.dtype) -> None:
    x, weight, bias = random(7, C, dtype=dtype), random(3 * C, C, dtype=dtype), random(3 * C, dtype=dtype)
    assert saved_bytes(lambda: qkv_projection(x, weight, bias, H)) == x.nbytes + weight.nbytes
    norm = (random(C), random(C), 1e-5)
    kept = 2 * x.nbytes + weight.nbytes + norm[0].nbytes + norm[1].nbytes + 7 * 2 * 4  # x, its norm, mean and rstd
    assert saved_bytes(lambda: qkv_projection(x, weight, bias, H, layer_norm=norm)) == kept


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_each_gradient_by_itself(wanted: int) -> None:
    torch.manual_seed(0)
    given = [random(7, C), random(3 * C, C), random(3 * C)]
    everything = torch.autograd.grad(qkv_projection(*given, H).square().sum(), given)
    alone = [value.detach().requires_grad_(index == wanted) for index, value in enumerate(given)]
    (found,) = torch.autograd.grad(qkv_projection(*alone, H).square().sum(), alone[wanted])
    assert same_bits(found, everything[wanted])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    given = [random(7, C), random(3 * C, C), random(3 * C)]
    cast = [value.detach().to(dtype).requires_grad_() for value in given]
    with torch.autocast("cpu", dtype):
        qkv = qkv_projection(*given, H)
    expected = qkv_projection(*cast, H)
    assert same_bits(qkv, expected)
    found = torch.autograd.grad(qkv.float().square().sum(), given)
    wanted = torch.autograd.grad(expected.float().square().sum(), cast)
    assert all(same_bits(one, other.float()) for one, other in zip(found, wanted, strict=True))


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def tables(positions: int, pairs: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_are_rotated_as_by_rotary(backend: str | None, interleaved: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias, (cos, sin) = random(9, C), random(3 * C, C), random(3 * C), tables(6, 2)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    options = {"positions": positions, "interleaved": interleaved, "backend": backend}
    qkv = qkv_projection(x, weight, bias, H, cos=cos, sin=sin, **options)  # type: ignore[arg-type]
    plain = qkv_projection(x, weight, bias, H, backend=backend)
    apart = rotary(plain.flatten(-3, -2), cos, sin, rotary_heads=2 * H, **options)  # type: ignore[arg-type]
    apart = apart.view(qkv.shape)
    assert same_bits(qkv, apart)
    gradient = torch.randn_like(qkv)
    found, wanted = (torch.autograd.grad(result, [x, weight, bias], gradient) for result in (qkv, apart))
    assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_rotated_result_is_no_view() -> None:
    cos, sin = tables(7, 2)
    qkv = qkv_projection(random(7, C), random(3 * C, C), random(3 * C), H, cos=cos, sin=sin)
    assert qkv.is_contiguous()
    assert not qkv._is_view()
    qkv.mul_(2.0).sum().backward()


def test_saves_the_tables_next_to_input_and_weight() -> None:
    x, weight, (cos, sin) = random(7, C), random(3 * C, C), tables(7, 2)
    kept = x.nbytes + weight.nbytes + cos.nbytes + sin.nbytes
    assert saved_bytes(lambda: qkv_projection(x, weight, None, H, cos=cos, sin=sin)) == kept


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_position_outside_of_the_tables_gives_nan_on_a_gpu(backend: str) -> None:
    x, weight = torch.ones(3, C, device="cuda"), torch.ones(3 * C, C, device="cuda")
    cos, sin = (table.cuda() for table in tables(4, 2))
    positions = torch.tensor([3, 4, -1], device="cuda")
    qkv = qkv_projection(x, weight, None, H, cos=cos, sin=sin, positions=positions, backend=backend)
    assert qkv.isnan().any(-1).any(-1).tolist() == [[False] * 3, [True, True, False], [True, True, False]]


# ---- backends --------------------------------------------------------------------------------------------------------


@interpreted
def test_triton_is_used_only_by_name_and_explain_says_why() -> None:
    x, weight = torch.randn(5, C), torch.randn(3 * C, C)
    free = explain("qkv_projection", x, weight, None, H)
    assert (free.chosen, free.reasons["triton"]) == ("torch", None)
    assert "triton     supports this call, used only by name: torch's GEMM is faster" in str(free)
    with use_backend("triton"):
        asked = explain("qkv_projection", x, weight, None, H)
        assert (asked.chosen, asked.backward) == ("triton", "triton")
        torch.testing.assert_close(
            qkv_projection(x, weight, None, H), qkv_projection(x, weight, None, H, backend="torch")
        )
    refused = explain("qkv_projection", x.double(), weight.double(), None, H, backend="triton")
    assert refused.chosen is None
    assert refused.reasons["triton"] == "takes float32, bfloat16 and float16, got float64"


def test_what_the_hopper_kernel_does_not_support() -> None:
    (cuda,) = (backend for backend in tables_of_backends()["qkv_projection"].backends if backend.name == "cuda")
    x, weight, cos = torch.randn(5, C).bfloat16(), torch.randn(3 * C, C).bfloat16(), torch.ones(5, 2)
    refusal = "takes rotary embedding only of heads of 64 columns, of all of them, not interleaved"
    assert cuda.refuse(x, weight, None, H, cos) == refusal
    wide, whole = (torch.zeros(rows, 128, dtype=torch.bfloat16) for rows in (5, 384)), torch.ones(5, 32)
    wide_x, wide_weight = wide
    assert cuda.refuse(wide_x, wide_weight, None, 2, whole, True) == refusal
    assert cuda.refuse(wide_x, wide_weight, None, 2, whole[:, :16]) == refusal
    assert cuda.refuse(wide_x, wide_weight, None, 2, whole) == "takes tensors on a GPU of compute capability 9.0"
    assert cuda.refuse(x.float(), weight.float(), None, H) == "takes bfloat16 and float16, got float32"
    assert cuda.refuse(x, weight, None, H) == "takes tensors on a GPU of compute capability 9.0"
    with pytest.raises(BackendRefused, match=r"backend 'cuda' does not support this call:\n  cuda: "):
        qkv_projection(x, weight, None, H, backend="cuda")
    assert explain("qkv_projection", x, weight, None, H, cos=cos, sin=cos).chosen == "torch"


def test_few_rows_are_left_to_torch() -> None:
    (cuda,) = (backend for backend in tables_of_backends()["qkv_projection"].backends if backend.name == "cuda")
    weight = torch.empty(3 * C, C)
    slower = "torch's GEMM is as fast for fewer than 4608 rows, got 4607"
    assert cuda.yield_forward(torch.empty(4607, C), weight) == slower
    assert cuda.yield_forward(torch.empty(2, 2304, C), weight) is None


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
# One tile, tiles that extend past the end, and several rounds of tiles on all SMs.
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (127, 72), (300, 200), (777, 768), (4700, 1024)])
@pytest.mark.parametrize("biased", [False, True])
def test_hopper_kernel(rows: int, columns: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(rows, columns + 8, device="cuda").to(dtype)
    x, weight = wide[:, :columns], (torch.randn(3 * columns, columns, device="cuda") * columns**-0.5).to(dtype)
    bias = torch.randn(3 * columns, device="cuda").to(dtype) if biased else None
    tested = qkv_projection(x, weight, bias, 2, backend="cuda")
    naive = reference.qkv_projection(x, weight, bias, 2)
    exact = reference.qkv_projection(x.double(), weight.double(), None if bias is None else bias.double(), 2)
    found = compare("qkv", tested, naive, exact, OUTPUT_FACTOR)
    assert found.ok, str(found)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("given", [False, True], ids=["dense", "positions"])
@pytest.mark.parametrize(("batch", "rows", "heads"), [(1, 1, 1), (3, 100, 2), (2, 127, 12), (9, 512, 16)])
def test_hopper_kernel_rotates(batch: int, rows: int, heads: int, given: bool) -> None:
    torch.manual_seed(0)
    columns, dtype = 64 * heads, torch.bfloat16
    x = torch.randn(batch, rows, columns, device="cuda").to(dtype)
    weight = (torch.randn(3 * columns, columns, device="cuda") * columns**-0.5).to(dtype)
    bias = torch.randn(3 * columns, device="cuda").to(dtype)
    cos, sin = (table.cuda() for table in tables(2 * rows, 32))
    positions = torch.randint(0, 2 * rows, (batch, rows), device="cuda") if given else None
    tested = qkv_projection(x, weight, bias, heads, cos=cos, sin=sin, positions=positions, backend="cuda")
    naive, exact = (
        rotary(
            reference.qkv_projection(x.to(own), weight.to(own), bias.to(own), heads).flatten(-3, -2),
            *(cos.to(table), sin.to(table)),
            positions=positions,
            rotary_heads=2 * heads,
            backend="reference",
        ).view(tested.shape)
        for own, table in ((dtype, torch.float32), (torch.float64, torch.float64))
    )
    found = compare("qkv", tested, naive, exact, OUTPUT_FACTOR)
    assert found.ok, str(found)
    values = qkv_projection(x, weight, bias, heads, backend="cuda").unbind(-3)[2]
    assert same_bits(tested.unbind(-3)[2], values)


@pytest.mark.gpu
@HOPPER
def test_hopper_kernel_has_nan_for_positions_outside_of_the_tables() -> None:
    x, weight = (torch.ones(rows, 64, device="cuda", dtype=torch.bfloat16) for rows in (3, 192))
    cos, sin = (table.cuda() for table in tables(4, 32))
    positions = torch.tensor([3, 4, -1], device="cuda")
    qkv = qkv_projection(x, weight, None, 1, cos=cos, sin=sin, positions=positions, backend="cuda")
    assert qkv.isnan().all(-1).all(-1).tolist() == [[False] * 3, [True, True, False], [True, True, False]]
