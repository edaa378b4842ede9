"""linear_cross_entropy: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer, liger, torch_peers
from fasttfm.kernels.linear_cross_entropy import reference
from fasttfm.ops import linear_cross_entropy
from fasttfm.testing.random_sizes import random_scale, random_shape, random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, TritonKernel, spoil
from fasttfm.testing.vocabulary_cases import IGNORED, cost, draw_hidden, draw_labels, loss_case, random_loss_options


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    inputs = draw_hidden(case, dtype, device, generator)
    shape = tuple(inputs["hidden"].shape[:-1])
    labels = draw_labels(shape, case.sizes.get("share", 0.9), case.sizes["vocabulary"], generator, device)
    return {**inputs, "labels": labels.int() if case.sizes.get("int32") else labels}


_NONE = {"reduction": "none"}
CASES = (
    loss_case("typical", 3, 7, 64, vocabulary=101),
    loss_case("sum", 9, 32, vocabulary=48, options={"reduction": "sum"}),
    loss_case("none", 3, 5, 32, vocabulary=40, options=_NONE),
    loss_case("smoothed", 9, 32, vocabulary=57, options={"label_smoothing": 0.1, "z_loss": 1e-3}),
    loss_case(
        "smoothed_none", 9, 32, vocabulary=57, options={"reduction": "none", "label_smoothing": 0.2, "z_loss": 1e-2}
    ),
    loss_case("no_bias", 7, 33, vocabulary=51, bias=False),
    loss_case("long_rows", 5, 16, vocabulary=4500),
    loss_case("one_row", 1, 40, vocabulary=9),
    loss_case("vector", 40, vocabulary=24),
    loss_case("one_word", 4, 16, vocabulary=1),
    loss_case("no_rows", 0, 16, vocabulary=12),
    loss_case("nothing_counts", 6, 16, vocabulary=12, share=0.0),
    loss_case("many_rows", 301, 16, vocabulary=24, interpret=False),
    loss_case("large_logits", 6, 32, vocabulary=40, scale=300.0),
    loss_case("transposed", 4, 6, 32, vocabulary=24, layout="transposed"),
    loss_case("strided", 4, 6, 32, vocabulary=24, layout="strided"),
    loss_case("int32_labels", 9, 32, vocabulary=24, int32=True, dtypes=(torch.float32,)),
    loss_case("total", 9, 32, vocabulary=24, options={"total": 64}, dtypes=(torch.float32,)),
    loss_case("word_0_ignored", 9, 32, vocabulary=4, options={"ignore_index": 0}, share=1.0, dtypes=(torch.float32,)),
)


def _random_case(source: random.Random) -> OpCase:
    options = random_loss_options(source)
    return loss_case(
        "random",
        *random_shape(source, largest=96),
        vocabulary=random_size(source, 300),
        options=options,
        bias=source.random() < 0.6,
        share=source.choice((0.0, 0.3, 1.0)),
        scale=random_scale(source),
        int32=source.random() < 0.3,
    )


def _cost(case: OpCase, dtype: torch.dtype, products: int) -> Cost:
    *leading, columns = case.sizes["shape"]
    return cost(torch.Size(leading).numel(), columns, case.sizes["vocabulary"], dtype, products)


def _logits(inputs: Inputs) -> Callable[[], Tensor]:
    hidden, weight, bias = inputs["hidden"].flatten(0, -2), inputs["weight"], inputs["bias"]
    return lambda: torch.nn.functional.linear(hidden, weight, bias)


def _torch_loss(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    logits, labels = _logits(inputs), inputs["labels"].flatten()
    return lambda: torch.nn.functional.cross_entropy(logits().float(), labels)


def _liger_loss(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    function = liger("ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction").apply
    hidden, labels = inputs["hidden"].flatten(0, -2), inputs["labels"].flatten()
    return lambda: function(hidden, inputs["weight"], labels, inputs["bias"])[0]


BAD_CALLS = (
    BadCall("hidden is no tensor", "hidden", TypeError, spoil("hidden", [1.0])),
    BadCall("hidden has no column", "hidden", ValueError, spoil("hidden", torch.ones(3, 7, 0))),
    BadCall("weight of other columns", "weight", ValueError, spoil("weight", torch.ones(101, 63))),
    BadCall("weight of another type", "weight", TypeError, spoil("weight", torch.ones(101, 64).bfloat16())),
    BadCall("weight without words", "weight", ValueError, spoil("weight", torch.ones(0, 64))),
    BadCall("bias too short", "bias", ValueError, spoil("bias", torch.ones(100))),
    BadCall("labels of another shape", "labels", ValueError, spoil("labels", torch.zeros(21, dtype=torch.int64))),
    BadCall("labels of reals", "labels", TypeError, spoil("labels", torch.zeros(3, 7))),
    BadCall("labels elsewhere", "labels", ValueError, spoil("labels", torch.zeros(3, 7).long().to("meta"))),
    BadCall("a label too large", "labels", ValueError, spoil("labels", torch.full((3, 7), 101))),
    BadCall("a label negative", "labels", ValueError, spoil("labels", torch.full((3, 7), -1))),
    BadCall("unknown reduction", "reduction", ValueError, spoil("reduction", "average")),
    BadCall("label_smoothing above 1", "label_smoothing", ValueError, spoil("label_smoothing", 1.5)),
    BadCall("z_loss is text", "z_loss", TypeError, spoil("z_loss", "much")),
    BadCall("ignore_index is a real", "ignore_index", TypeError, spoil("ignore_index", 0.0)),
    BadCall("total is negative", "total", ValueError, spoil("total", -1)),
    BadCall("total of two", "total", ValueError, spoil("total", torch.ones(2))),
    BadCall("shift is a number", "shift", TypeError, spoil("shift", 1)),
    BadCall("cu_seqlens without shift", "cu_seqlens", ValueError, spoil("cu_seqlens", torch.tensor([0, 3]).int())),
)


def _reference(**arguments: Any) -> Tensor:
    return reference.linear_cross_entropy(**arguments)


def _over_all_rows(**arguments: Any) -> Tensor:
    """A mean over all rows instead of those that count."""
    return _reference(**{**arguments, "total": max(1, arguments["labels"].numel())})


def _without_bias(**arguments: Any) -> Tensor:
    return _reference(**{**arguments, "bias": None})


def _one_late(**arguments: Any) -> Tensor:
    return _reference(**{**arguments, "labels": arguments["labels"].roll(1, dims=-1)})


class _WithoutTarget(torch.autograd.Function):
    """Right loss, and a gradient that lacks the label's term."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return torch.nn.functional.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        counted = labels != IGNORED
        return logits.softmax(dim=-1) * (counted[:, None] * dloss / counted.sum()), None


def _dropped_target(**arguments: Any) -> Tensor:
    logits = _logits(arguments)()
    return _WithoutTarget.apply(logits, arguments["labels"].flatten().long())


def _triton_kernels() -> list[TritonKernel]:
    from fasttfm.kernels.linear_cross_entropy import triton as kernels
    from fasttfm.kernels.vocabulary import triton_pick_rows, triton_scale, triton_tail

    signatures = []
    for element, everything in (("bf16", False), ("bf16", True), ("fp32", True)):
        signatures += kernels.compile_signatures(30528, element, everything=everything)
    for columns, element in ((64, "fp32"), (768, "bf16")):
        signatures += triton_pick_rows.compile_signatures(columns, element)
        signatures += triton_tail.compile_signatures(columns, element, 2)
        signatures += triton_scale.compile_signatures("fp32", element)
    return [TritonKernel(**description) for description in signatures]


_BF16 = (torch.bfloat16,)
SPEC = OpSpec(
    name="linear_cross_entropy",
    function=linear_cross_entropy,
    reference=_reference,
    inputs=_inputs,
    differentiable=("hidden", "weight", "bias"),
    cases=CASES,
    property_cases=("no_bias", "typical", "none"),
    torch_products=True,
    random_case=_random_case,
    bench_cases=(
        loss_case("32768x768x50257", 32768, 768, vocabulary=50257, bias=False, share=1.0, dtypes=_BF16),
        loss_case("8192x1024x50257", 8192, 1024, vocabulary=50257, bias=False, share=1.0, dtypes=_BF16),
    ),
    bench_cases_cpu=(
        loss_case("128x768x50257", 128, 768, vocabulary=50257, bias=False, share=1.0, dtypes=(torch.float32,)),
    ),
    forward_cost=lambda case, dtype: _cost(case, dtype, 1),
    backward_cost=lambda case, dtype: _cost(case, dtype, 2),
    gradients_in_forward=True,
    peers=(
        *torch_peers(_torch_loss),
        Peer("liger", _liger_loss),
    ),
    bad_calls=BAD_CALLS,
    mutants={
        "mean over all rows": _over_all_rows,
        "without bias": _without_bias,
        "labels one late": _one_late,
        "the label's term of the gradient dropped": _dropped_target,
    },
    triton_kernels=_triton_kernels,
)
