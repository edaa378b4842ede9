"""dropout_add_layer_norm: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.dropout_add_layer_norm import reference
from fasttfm.ops import dropout_add_layer_norm
from fasttfm.testing.random_sizes import NORMALISED, random_lengths, random_scale, random_shape, some_of
from fasttfm.testing.row_cases import BAD_ROWS, in_layout
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, spoil, triton_kernels

PARAMETERS = ("weight", "bias", "linear_bias")
SEED = 0x123456789ABCDEF


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = case.sizes["shape"]
    columns = shape[-1]

    def type_of(name: str) -> torch.dtype:
        wide: torch.dtype = case.sizes.get(name) or dtype
        return dtype if dtype == torch.float64 else wide

    def tensor(*sizes: int, dtype: torch.dtype) -> Tensor:
        return draw(generator, *sizes, dtype=dtype, device=device, scale=case.sizes.get("scale", 1.0))

    def rows(dtype: torch.dtype) -> Tensor:
        x = tensor(*shape, dtype=dtype) + case.sizes.get("offset", 0.0)
        return in_layout(x, case.sizes.get("layout", "contiguous"), functools.partial(tensor, dtype=dtype), padding=8)

    inputs: Inputs = {"x": rows(dtype), "residual": rows(type_of("residual_dtype"))}
    for name in PARAMETERS:
        used = name in case.sizes.get("parameters", PARAMETERS)
        inputs[name] = tensor(columns, dtype=type_of("parameter_dtype")) if used else None
    lengths = case.sizes.get("lengths")
    if lengths is not None:
        starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        inputs["cu_seqlens"] = starts.to(device)
    inputs["seed"] = torch.tensor([SEED], device=device)
    return inputs


def _case(name: str, *shape: int, p: float = 0.1, eps: float = 1e-5, prenorm: bool = False, **sizes: Any) -> OpCase:
    return OpCase(name, {"shape": shape, **sizes}, {"p": p, "eps": eps, "prenorm": prenorm})


CASES = (
    _case("typical", 3, 5, 64),
    _case("prenorm", 3, 5, 64, prenorm=True),
    _case("no_dropout", 3, 5, 64, p=0.0),
    _case("no_dropout_prenorm", 3, 5, 64, p=0.0, prenorm=True),
    _case("all_dropped", 2, 3, 40, p=1.0, prenorm=True),
    _case("packed", 17, 48, p=0.5, lengths=(5, 0, 1, 11)),
    _case("odd", 7, 33, prenorm=True),
    _case("one_row", 1, 100),
    _case("one_column", 5, 1),
    _case("vector", 40),
    _case("no_rows", 0, 16),
    _case("empty_sequences", 0, 16, lengths=(0, 0)),
    _case("many_rows", 301, 48),
    _case("wide", 3, 1543),
    _case("three_vectors", 5, 720),
    _case("no_weight", 4, 40, parameters=("bias",)),
    _case("no_bias", 4, 40, parameters=("weight",), prenorm=True),
    _case("linear_bias_alone", 4, 40, parameters=("linear_bias",), p=0.0),
    _case("plain", 4, 40, parameters=()),
    _case("fp32_parameters", 6, 96, parameter_dtype=torch.float32),
    _case("fp32_residual", 6, 96, residual_dtype=torch.float32, prenorm=True),
    _case("fp32_residual_no_dropout", 6, 96, residual_dtype=torch.float32, parameter_dtype=torch.float32, p=0.0),
    _case("large_mean", 6, 96, offset=100.0),
    _case("large_scale", 6, 96, scale=300.0),
    _case("tiny_scale", 6, 96, scale=1e-3, eps=1e-12),
    _case("transposed", 4, 6, 32, layout="transposed"),
    _case("sliced", 9, 32, layout="sliced"),
)


def _random_case(source: random.Random) -> OpCase:
    packed = source.random() < 0.3
    lengths = random_lengths(source)
    shape = random_shape(source, smallest=NORMALISED)
    return _case(
        "random",
        *((sum(lengths), shape[-1]) if packed else shape),
        p=source.choice((0.0, 0.1, 0.5, 1.0)),
        eps=source.choice((1e-12, 1e-5)),
        prenorm=source.random() < 0.5,
        parameters=some_of(source, PARAMETERS),
        parameter_dtype=source.choice((torch.float32, None)),
        residual_dtype=source.choice((torch.float32, None)),
        scale=random_scale(source),
        lengths=lengths if packed else None,
    )


def _tensor_bytes(case: OpCase, dtype: torch.dtype) -> float:
    return torch.Size(case.sizes["shape"]).numel() * dtype.itemsize


def _forward_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    """Reads x and residual, writes y and z."""
    return Cost(bytes=4 * _tensor_bytes(case, dtype))


def _inference_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    """Writes z only where it is a result."""
    return Cost(bytes=(3 + bool(case.options["prenorm"])) * _tensor_bytes(case, dtype))


def _backward_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    """Reads dy and z, with prenorm also dz; writes dresidual and, if it is another, dx."""
    tensors = 3 + bool(case.options["p"]) + bool(case.options["prenorm"])
    return Cost(bytes=tensors * _tensor_bytes(case, dtype))


def _torch(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
    x, residual, linear_bias = inputs["x"], inputs["residual"], inputs["linear_bias"]

    def call() -> Any:
        branch = x if linear_bias is None else x + linear_bias
        z = residual + torch.nn.functional.dropout(branch, options["p"])
        y = torch.nn.functional.layer_norm(z, z.shape[-1:], inputs["weight"], inputs["bias"], options["eps"])
        return (y, z) if options["prenorm"] else y

    return call


BAD_CALLS = (
    *BAD_ROWS,
    BadCall("residual left out", "residual", TypeError, spoil("residual", None)),
    BadCall("residual of another shape", "residual", ValueError, spoil("residual", torch.ones(15, 64))),
    BadCall("residual elsewhere", "residual", ValueError, spoil("residual", torch.ones(3, 5, 64, device="meta"))),
    BadCall("residual below x", "residual", TypeError, spoil("residual", torch.ones(3, 5, 64).bfloat16())),
    BadCall("weight too short", "weight", ValueError, spoil("weight", torch.ones(63))),
    BadCall("bias is a number", "bias", TypeError, spoil("bias", 1.0)),
    BadCall("linear_bias elsewhere", "linear_bias", ValueError, spoil("linear_bias", torch.ones(64, device="meta"))),
    BadCall("double weight, single x", "x", TypeError, spoil("weight", torch.ones(64, dtype=torch.float64))),
    BadCall("p above one", "p", ValueError, spoil("p", 1.5)),
    BadCall("p negative", "p", ValueError, spoil("p", -0.1)),
    BadCall("p is text", "p", TypeError, spoil("p", "half")),
    BadCall("eps is negative", "eps", ValueError, spoil("eps", -1.0)),
    BadCall("seed is a number", "seed", TypeError, spoil("seed", 1)),
    BadCall("seed of int32", "seed", TypeError, spoil("seed", torch.ones(1, dtype=torch.int32))),
    BadCall("two seeds", "seed", ValueError, spoil("seed", torch.ones(2, dtype=torch.int64))),
    BadCall("seed elsewhere", "seed", ValueError, spoil("seed", torch.ones(1, dtype=torch.int64, device="meta"))),
    BadCall("cu_seqlens next to [B, S, C]", "x", ValueError, spoil("cu_seqlens", torch.tensor([0, 15]).int())),
    BadCall("cu_seqlens of int64", "cu_seqlens", TypeError, spoil("cu_seqlens", torch.tensor([0, 15]))),
)


def _other_mask(*args: Any, seed: Tensor | None, **options: Any) -> Any:
    return reference.dropout_add_layer_norm(*args, **options, seed=None if seed is None else seed + 1)


def _unscaled(x: Tensor, residual: Tensor, *, p: float, **options: Any) -> Any:
    """Keeps the right elements, without 1 / (1 - p)."""
    kept = 256 - max(1, round(p * 256)) if p else 256
    if options["linear_bias"] is not None:
        options["linear_bias"] = options["linear_bias"] * (kept / 256)
    return reference.dropout_add_layer_norm(x * (kept / 256), residual, p=p, **options)


def _position_in_the_batch(x: Tensor, *args: Any, cu_seqlens: Tensor | None = None, **options: Any) -> Any:
    """Takes a packed row's number for its position."""
    return reference.dropout_add_layer_norm(x, *args, cu_seqlens=None, **options)


class _ForgottenStream(torch.autograd.Function):
    """Hands z on and drops its gradient."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        return torch.zeros_like(dz)


def _without_dz(*args: Any, **options: Any) -> Any:
    outputs = reference.dropout_add_layer_norm(*args, **options)
    return outputs if isinstance(outputs, Tensor) else (outputs[0], _ForgottenStream.apply(outputs[1]))


# Of rows, residual and parameters.
_TRITON_TYPES = (("bf16",) * 3, ("bf16", "fp32", "fp32"), ("fp16",) * 3, ("fp32",) * 3)
SPEC = OpSpec(
    name="dropout_add_layer_norm",
    function=dropout_add_layer_norm,
    reference=reference.dropout_add_layer_norm,
    inputs=_inputs,
    differentiable=("x", "residual", *PARAMETERS),
    cases=CASES,
    property_cases=("prenorm", "packed"),
    random_case=_random_case,
    bench_cases=(
        _case("64x512x1024", 64, 512, 1024, parameters=("weight", "bias")),
        _case("64x512x4096", 64, 512, 4096, parameters=("weight", "bias")),
        _case("64x512x1024_prenorm", 64, 512, 1024, parameters=("weight", "bias"), prenorm=True),
        _case("64x512x1024_linear_bias", 64, 512, 1024),
    ),
    bench_cases_cpu=(_case("4x512x768", 4, 512, 768, parameters=("weight", "bias")),),
    forward_cost=_forward_cost,
    backward_cost=_backward_cost,
    inference_cost=_inference_cost,
    peers=torch_peers(_torch),
    bad_calls=BAD_CALLS,
    mutants={
        "another mask": _other_mask,
        "without the scale": _unscaled,
        "positions in the batch": _position_in_the_batch,
        "the gradient of z dropped": _without_dz,
    },
    triton_kernels=triton_kernels(
        "dropout_add_layer_norm",
        *((columns, *types) for columns in (64, 768, 1024, 4096, 8192) for types in _TRITON_TYPES),
    ),
)
