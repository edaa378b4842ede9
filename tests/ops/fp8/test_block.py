"""A layer with FP8 operands in its GEMMs, against the unfused layer in plain torch with rounded operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.fp8.reference import quantize
from fasttfm.kernels.transformer_block import reference
from fasttfm.ops.fp8 import E4M3, E5M2, Fp8Linear, LayerFp8, Scales, Slot
from fasttfm.ops.fp8.block import fp8_block
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters
from fasttfm.testing import compare
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR

WIDTH, INNER, HEADS = 32, 64, 2
ENDS = (0, 9, 9, 10, 23)
OPTIONS = BlockOptions(HEADS, 13, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-5, False, False, None)
SHAPES = BlockParameters(
    *((3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)),  # type: ignore[arg-type]
    *((INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,), (WIDTH,), (WIDTH,)),
)


def slots(gradients: torch.dtype = E5M2, linears: int = 1) -> list[Slot]:
    return Scales([E4M3, E4M3, gradients] * linears, 4, torch.device("cpu")).slots


def rounded(x: Tensor, slot: Slot) -> Tensor:
    slot.measure(x)
    return quantize(x, slot.scale, slot.dtype).to(x.dtype) * slot.inverse


class RoundedLinear(torch.autograd.Function):
    """A linear layer with operands rounded to FP8, in plain torch: the naive implementation of the tolerance rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = slots()
        saved = rounded(x, own[0]), rounded(weight, own[1])
        ctx.save_for_backward(*saved)
        return saved[0] @ saved[1].t() + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g = rounded(dy, slots()[2])
        return g @ weight, g.t() @ x, dy.sum(0)


def drawn(pre_norm: bool) -> list[Tensor]:
    """x, the parameters and, in a pre-LN model, the residual stream."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[Any] = [(ENDS[-1], WIDTH), *SHAPES, *([(ENDS[-1], WIDTH)] * pre_norm)]
    return [torch.randn(shape, generator=generator) * WIDTH**-0.5 for shape in shapes]


def results(function: Any, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The outputs, and the gradients of all inputs and parameters."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    count = len(BlockParameters._fields)
    parameters, residual = BlockParameters(*leaves[1 : 1 + count]), leaves[-1] if len(leaves) > 1 + count else None
    found = function(leaves[0], residual, torch.tensor(ENDS, dtype=torch.int32), parameters)
    outputs = [output for output in found if output is not None]
    weights = [torch.linspace(-1, 1, each.numel(), dtype=dtype).view_as(each) for each in outputs]
    loss = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def plain(x: Tensor, residual: Tensor | None, cu_seqlens: Tensor, parameters: BlockParameters) -> Any:
    return reference.transformer_block(x, residual, cu_seqlens, OPTIONS, parameters)


def layer_of(parameters: BlockParameters) -> LayerFp8:
    own = iter(slots(linears=4))
    weights = (parameters.qkv_weight, parameters.out_weight, parameters.up_weight, parameters.down_weight)
    return LayerFp8(*(Fp8Linear(each, (next(own), next(own), next(own))) for each in weights))


def block(x: Tensor, residual: Tensor | None, cu_seqlens: Tensor, parameters: BlockParameters) -> Any:
    return fp8_block(x, residual, cu_seqlens, None, OPTIONS, parameters, layer_of(parameters))


def wrong(found: list[Tensor], naive: list[Tensor], exact: list[Tensor], *, pre_norm: bool) -> list[str]:
    """The results that violate the tolerance rule, compared with the unrounded layer in fp64."""
    names = ["y", *["z"] * pre_norm, "dx", *(f"d{name}" for name in BlockParameters._fields), *["dresidual"] * pre_norm]
    factors = [OUTPUT_FACTOR] * (1 + pre_norm) + [GRADIENT_FACTOR] * (len(names) - 1 - pre_norm)
    compared = [compare(*each) for each in zip(names, found, naive, exact, factors, strict=True)]
    return [str(each) for each in compared if not each.ok]


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-LN", "pre-LN"])
def test_as_the_unfused_layer_with_rounded_operands(pre_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = drawn(pre_norm)
    exact = results(plain, tensors, torch.float64)
    found = results(block, tensors, torch.float32)
    monkeypatch.setattr(torch.nn.functional, "linear", RoundedLinear.apply)
    naive = results(plain, tensors, torch.float32)
    assert wrong(found, naive, exact, pre_norm=pre_norm) == []
    # Most operands round to the same numbers in both, so that they are closer to each other than to the exact result.
    for one, other, unrounded in zip(found, naive, exact, strict=True):
        assert (one - other).norm() <= 0.3 * (other - unrounded).norm() + 1e-5 * unrounded.norm()


@pytest.mark.parametrize("broken", ["weight_gradient", "input_gradient", "forward"])
def test_wrong_operands_are_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = drawn(False)
    exact = results(plain, tensors, torch.float64)
    whole = getattr(Fp8Linear, broken)
    monkeypatch.setattr(Fp8Linear, broken, lambda *given: whole(*given) * 1.5)
    found = results(block, tensors, torch.float32)
    monkeypatch.setattr(torch.nn.functional, "linear", RoundedLinear.apply)
    assert wrong(found, results(plain, tensors, torch.float32), exact, pre_norm=False)


def test_what_the_layer_keeps() -> None:
    """23 bytes for each of C elements of a token in bf16, with I = 4 C, apart from statistics."""
    kept: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, width = 256, 64
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    sizes = [(3 * width, width), (3 * width,), (width, width), *[(width,)] * 3]
    sizes += [(4 * width, width), (4 * width,), (width, 4 * width), *[(width,)] * 3]
    parameters = BlockParameters(*(torch.randn(size, generator=generator, requires_grad=True) for size in sizes))
    with torch.autograd.graph.saved_tensors_hooks(record, lambda each: each):
        options = OPTIONS._replace(max_seqlen=tokens)
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
        y, _ = fp8_block(x, None, cu_seqlens, None, options, parameters, layer_of(parameters))
    own = {each.untyped_storage().data_ptr() for each in parameters if each is not None}
    own.add(y.untyped_storage().data_ptr())
    found = sum(size for address, size in kept.items() if address not in own)
    statistics = 4 * tokens * (2 + 2 + HEADS) + 1024
    assert found <= 23 * tokens * width + statistics


def test_an_update_between_forward_and_backward_is_refused() -> None:
    tensors = [each.requires_grad_() for each in drawn(False)]
    parameters = BlockParameters(*tensors[1:])
    layer = layer_of(parameters)
    y, _ = fp8_block(tensors[0], None, torch.tensor(ENDS, dtype=torch.int32), None, OPTIONS, parameters, layer)
    layer.qkv.input.scales.update()
    with pytest.raises(RuntimeError, match="expected the backward before the scales' update"):
        y.sum().backward()
