"""masked_lm_loss: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer, compiled, liger
from fasttfm.kernels.masked_lm_loss import reference
from fasttfm.ops import masked_lm_loss
from fasttfm.testing.random_sizes import random_scale, random_shape, random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, spoil
from fasttfm.testing.vocabulary_cases import IGNORED, cost, draw_hidden, draw_labels, loss_case, random_loss_options


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    inputs = draw_hidden(case, dtype, device, generator)
    vocabulary = case.sizes["vocabulary"]
    leading = tuple(inputs["hidden"].shape[:-1])
    chosen = case.sizes.get("positions")  # how many, or the rows themselves; None: found by the labels
    if chosen is None:
        labels = draw_labels(leading, case.sizes.get("share", 0.3), vocabulary, generator, device)
        return {**inputs, "labels": labels, "positions": None}
    if isinstance(chosen, int):
        positions = torch.randperm(torch.Size(leading).numel(), generator=generator)[:chosen].sort().values
    else:
        positions = torch.tensor(chosen, dtype=torch.int64)
    share = case.sizes.get("share", 1.0)
    labels = draw_labels(tuple(positions.shape), share, vocabulary, generator, device)
    return {**inputs, "labels": labels, "positions": positions.to(device)}


_SINGLE = (torch.float32,)
CASES = (
    loss_case("typical", 3, 7, 64, vocabulary=101, positions=6),
    loss_case("found", 3, 7, 32, vocabulary=57),
    loss_case("bounded", 3, 7, 32, vocabulary=57, options={"max_predictions": 12}),
    loss_case("found_none", 3, 7, 32, vocabulary=57, options={"reduction": "none"}, dtypes=_SINGLE),
    loss_case("none", 21, 32, vocabulary=57, positions=5, options={"reduction": "none"}),
    loss_case("sum", 21, 32, vocabulary=57, positions=5, options={"reduction": "sum"}, dtypes=_SINGLE),
    loss_case("smoothed", 21, 32, vocabulary=57, positions=5, options={"label_smoothing": 0.1, "z_loss": 1e-3}),
    loss_case("any_order_and_repeated", 9, 32, vocabulary=24, positions=(7, 2, 2, 8, 0, 2, 7)),
    loss_case("filled_up", 9, 32, vocabulary=24, positions=(1, 2, 5, 0, 0, 0), share=0.5),
    loss_case("two_dimensions", 3, 4, 32, vocabulary=24, positions=((1, 2), (5, 4), (9, 11)), dtypes=_SINGLE),
    loss_case("no_positions", 9, 32, vocabulary=24, positions=0),
    loss_case("nothing_found", 9, 32, vocabulary=24, share=0.0),
    loss_case("no_rows", 0, 32, vocabulary=24, dtypes=_SINGLE),
    loss_case("all_rows", 9, 32, vocabulary=24, share=1.0, dtypes=_SINGLE),
    loss_case("no_bias", 9, 33, vocabulary=51, positions=4, bias=False),
    loss_case("transposed", 4, 6, 32, vocabulary=24, positions=7, layout="transposed"),
    loss_case("strided", 4, 6, 32, vocabulary=24, layout="strided", dtypes=_SINGLE),
)


def _random_case(source: random.Random) -> OpCase:
    *leading, columns = random_shape(source, largest=96)
    rows = math.prod(leading)
    positions = tuple(source.randrange(rows) for _ in range(source.randint(0, rows))) if rows else ()
    options = random_loss_options(source)
    return loss_case(
        "random",
        *leading,
        columns,
        vocabulary=random_size(source, 300),
        options=options,
        bias=source.random() < 0.6,
        share=source.choice((0.0, 0.3, 1.0)),
        scale=random_scale(source),
        positions=source.choice((None, positions)),
    )


def _predicted(case: OpCase) -> int:
    positions = case.sizes["positions"]
    return positions if isinstance(positions, int) else torch.tensor(positions).numel()


def _cost(case: OpCase, dtype: torch.dtype, products: int) -> Cost:
    """The products of the predicted rows; and in the backward the gradient of all rows, which is zero at the others."""
    *leading, columns = case.sizes["shape"]
    least = cost(_predicted(case), columns, case.sizes["vocabulary"], dtype, products)
    zeros = torch.Size(leading).numel() * columns * dtype.itemsize if products == 2 else 0
    return Cost(bytes=least.bytes + zeros, flops=least.flops)


# ---- peers -----------------------------------------------------------------------------------------------------------


def _dense(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Every row through the vocabulary, as transformers' heads do."""
    hidden, weight, bias = inputs["hidden"], inputs["weight"], inputs["bias"]
    labels = torch.full(hidden.shape[:-1], IGNORED, device=hidden.device).flatten()
    labels[inputs["positions"]] = inputs["labels"]
    functional = torch.nn.functional
    return lambda: functional.cross_entropy(functional.linear(hidden, weight, bias).flatten(0, -2).float(), labels)


def _gathered(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    hidden, weight, bias = inputs["hidden"].flatten(0, -2), inputs["weight"], inputs["bias"]
    positions, labels, functional = inputs["positions"], inputs["labels"], torch.nn.functional
    return lambda: functional.cross_entropy(functional.linear(hidden[positions], weight, bias).float(), labels)


def _liger_gathered(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    function = liger("ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction").apply
    hidden, positions = inputs["hidden"].flatten(0, -2), inputs["positions"]
    return lambda: function(hidden[positions], inputs["weight"], inputs["labels"], inputs["bias"])[0]


BAD_CALLS = (
    BadCall("hidden of integers", "hidden", TypeError, spoil("hidden", torch.ones(3, 7, 64).long())),
    BadCall("weight of other columns", "weight", ValueError, spoil("weight", torch.ones(101, 63))),
    BadCall("bias of another type", "bias", TypeError, spoil("bias", torch.ones(101).half())),
    BadCall("labels of another number", "labels", ValueError, spoil("labels", torch.zeros(7, dtype=torch.int64))),
    BadCall("a label too large", "labels", ValueError, spoil("labels", torch.full((6,), 101))),
    BadCall("positions of reals", "positions", TypeError, spoil("positions", torch.zeros(6))),
    BadCall("a position too large", "positions", ValueError, spoil("positions", torch.full((6,), 21))),
    BadCall("a position negative", "positions", ValueError, spoil("positions", torch.full((6,), -1))),
    BadCall("positions elsewhere", "positions", ValueError, spoil("positions", torch.zeros(6).long().to("meta"))),
    BadCall("max_predictions with positions", "max_predictions", ValueError, spoil("max_predictions", 8)),
    BadCall("max_predictions is a real", "max_predictions", TypeError, spoil("max_predictions", 8.0)),
    BadCall("max_predictions is negative", "max_predictions", ValueError, spoil("max_predictions", -8)),
    BadCall("unknown reduction", "reduction", ValueError, spoil("reduction", "batchmean")),
    BadCall("total with a sum", "total", ValueError, lambda _, options: options.update(reduction="sum", total=3)),
    BadCall("sample is a number", "sample", TypeError, spoil("sample", 1)),
    BadCall("temperature 0", "temperature", ValueError, spoil("temperature", 0.0)),
    BadCall("seed of int32", "seed", TypeError, spoil("seed", torch.zeros(1, dtype=torch.int32))),
)


def _reference(**arguments: Any) -> Tensor:
    arguments.pop("max_predictions", None)
    return reference.masked_lm_loss(**arguments)


def _one_row_late(**arguments: Any) -> Tensor:
    return _reference(**{**arguments, "hidden": arguments["hidden"].roll(1, dims=-2)})


def _ignored_rows_count(**arguments: Any) -> Tensor:
    return _reference(**{**arguments, "labels": arguments["labels"].clamp(min=0)})


def _bench(tokens: int, columns: int, vocabulary: int = 30522, dtypes: tuple[torch.dtype, ...] = ()) -> OpCase:
    name, predicted = f"{tokens}x{columns}x{vocabulary}", round(0.15 * tokens)
    dtypes = dtypes or (torch.bfloat16,)
    return loss_case(name, tokens, columns, vocabulary=vocabulary, positions=predicted, dtypes=dtypes)


SPEC = OpSpec(
    name="masked_lm_loss",
    function=masked_lm_loss,
    reference=_reference,
    inputs=_inputs,
    differentiable=("hidden", "weight", "bias"),
    cases=CASES,
    property_cases=("filled_up", "typical", "none"),
    torch_products=True,
    random_case=_random_case,
    bench_cases=(_bench(32768, 1024), _bench(32768, 768), _bench(131072, 1024), _bench(131072, 768)),
    bench_cases_cpu=(_bench(1024, 768, dtypes=(torch.float32,)),),
    forward_cost=lambda case, dtype: _cost(case, dtype, 1),
    backward_cost=lambda case, dtype: _cost(case, dtype, 2),
    gradients_in_forward=True,
    peers=(
        Peer("torch dense", _dense),
        Peer("torch gathered", _gathered),
        Peer("torch.compile gathered", compiled(_gathered)),
        Peer("liger gathered", _liger_gathered),
    ),
    bad_calls=BAD_CALLS,
    mutants={"rows one late": _one_row_late, "ignored rows count": _ignored_rows_count},
)
