"""contrastive_loss: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.contrastive_loss import reference
from fasttfm.ops import contrastive_loss
from fasttfm.testing.random_sizes import random_scale, random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, op_case, spoil
from fasttfm.testing.vocabulary_cases import IGNORED, cost


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """Queries and keys whose scores, before the temperature, are of the size ``scale``."""
    rows, columns = case.sizes["queries"], case.sizes["columns"]
    keys, negatives = case.sizes.get("keys", rows), case.sizes.get("negatives")
    scale = (case.sizes.get("scale", 0.1) ** 2 / columns) ** 0.25

    def tensor(*sizes: int) -> Tensor:
        return draw(generator, *sizes, columns, dtype=dtype, device=device, scale=scale)

    labels = None
    if "share" in case.sizes:  # of the queries that count
        labels = torch.randint(0, keys, (rows,), generator=generator)
        labels = labels.masked_fill(torch.rand(rows, generator=generator) >= case.sizes["share"], IGNORED).to(device)
    return {
        "queries": tensor(rows),
        "keys": tensor(keys),
        "negatives": None if negatives is None else tensor(*negatives),
        "labels": labels,
    }


def _case(name: str, queries: int, columns: int, options: dict[str, Any] | None = None, **sizes: Any) -> OpCase:
    """Triton's kernels, which are linear_cross_entropy's, are interpreted only in the cases that differ for them."""
    all_options = {"temperature": 0.05, "symmetric": False, "reduction": "mean", **(options or {})}
    return op_case(name, all_options, queries=queries, columns=columns, interpret=name in _INTERPRETED, **sizes)


_INTERPRETED = ("typical", "more_keys", "labels", "none")
_SINGLE = (torch.float32,)
CASES = (
    _case("typical", 24, 48),
    _case("symmetric", 17, 32, {"symmetric": True, "temperature": 0.1}),
    _case("hard_negatives", 13, 32, negatives=(13, 3)),
    _case("symmetric_with_negatives", 9, 32, {"symmetric": True}, negatives=(5,), dtypes=_SINGLE),
    _case("more_keys", 10, 33, keys=27),
    _case("labels", 15, 32, keys=11, share=0.7),
    _case("nothing_counts", 5, 16, share=0.0, dtypes=_SINGLE),
    _case("none", 15, 32, {"reduction": "none", "temperature": 0.2}, negatives=(4,)),
    _case("none_symmetric", 8, 16, {"reduction": "none", "symmetric": True}, dtypes=_SINGLE),
    _case("sum", 12, 24, {"reduction": "sum"}, dtypes=_SINGLE),
    _case("one_pair", 1, 16, dtypes=_SINGLE),
    _case("no_queries", 0, 16, keys=4, dtypes=_SINGLE),
    _case("sharp", 16, 32, {"temperature": 0.001}, scale=0.02),
    _case("temperature_1", 16, 32, {"temperature": 1.0}, scale=1.0),
)


def _random_case(source: random.Random) -> OpCase:
    rows, columns = random_size(source, 96), random_size(source, 96)
    options = {
        "reduction": source.choice(("mean", "sum", "none")),
        "temperature": source.choice((0.05, 0.2, 1.0)),
        "symmetric": source.random() < 0.3,
    }
    further: dict[str, Any] = (
        {} if options["symmetric"] else {"keys": rows + source.choice((0, random_size(source, 64)))}
    )
    if not options["symmetric"] and source.random() < 0.3:
        further["share"] = source.choice((0.0, 0.5, 1.0))
    if source.random() < 0.4:
        further["negatives"] = (random_size(source, 64),)
    return _case("random", rows, columns, options, scale=0.1 * random_scale(source), **further)


def _cost(case: OpCase, dtype: torch.dtype, products: int) -> Cost:
    rows, columns = case.sizes["queries"], case.sizes["columns"]
    return cost(rows, columns, case.sizes.get("keys", rows), dtype, products)


# ---- peers -----------------------------------------------------------------------------------------------------------


def _torch_loss(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """As sentence-transformers writes it."""
    queries, keys = inputs["queries"], inputs["keys"]
    labels, functional = torch.arange(len(queries), device=queries.device), torch.nn.functional
    scale = 1 / options["temperature"]
    return lambda: functional.cross_entropy((queries @ keys.t() * scale).float(), labels)


def _update(inputs: Inputs, options: dict[str, Any], **changes: Any) -> None:
    inputs.update(changes)
    options["symmetric"] = True


BAD_CALLS = (
    BadCall("queries of integers", "queries", TypeError, spoil("queries", torch.ones(24, 48).long())),
    BadCall("queries of three dimensions", "queries", ValueError, spoil("queries", torch.ones(2, 24, 48))),
    BadCall("keys of other columns", "keys", ValueError, spoil("keys", torch.ones(24, 47))),
    BadCall("keys of another type", "keys", TypeError, spoil("keys", torch.ones(24, 48).half())),
    BadCall("fewer keys than queries", "keys", ValueError, spoil("keys", torch.ones(23, 48))),
    BadCall("negatives of other columns", "negatives", ValueError, spoil("negatives", torch.ones(3, 47))),
    BadCall("negatives elsewhere", "negatives", ValueError, spoil("negatives", torch.ones(3, 48).to("meta"))),
    BadCall("labels of another number", "labels", ValueError, spoil("labels", torch.zeros(23).long())),
    BadCall("a label too large", "labels", ValueError, spoil("labels", torch.full((24,), 24))),
    BadCall("temperature 0", "temperature", ValueError, spoil("temperature", 0.0)),
    BadCall("symmetric is a number", "symmetric", TypeError, spoil("symmetric", 1)),
    BadCall("unknown reduction", "reduction", ValueError, spoil("reduction", "average")),
    BadCall(
        "symmetric with labels",
        "symmetric",
        ValueError,
        lambda inputs, options: _update(inputs, options, labels=torch.arange(24)),
    ),
    BadCall(
        "symmetric with more keys",
        "keys",
        ValueError,
        lambda inputs, options: _update(inputs, options, keys=torch.ones(25, 48)),
    ),
)


def _one_late(**arguments: Any) -> Tensor:
    return reference.contrastive_loss(**{**arguments, "keys": arguments["keys"].roll(1, dims=0)})


def _without_temperature(**arguments: Any) -> Tensor:
    return reference.contrastive_loss(**{**arguments, "temperature": 1.0})


def _without_negatives(**arguments: Any) -> Tensor:
    return reference.contrastive_loss(**{**arguments, "negatives": None})


def _one_direction(**arguments: Any) -> Tensor:
    return reference.contrastive_loss(**{**arguments, "symmetric": False})


SPEC = OpSpec(
    name="contrastive_loss",
    function=contrastive_loss,
    reference=reference.contrastive_loss,
    inputs=_inputs,
    differentiable=("queries", "keys", "negatives"),
    cases=CASES,
    property_cases=("labels", "typical", "none"),
    torch_products=True,
    random_case=_random_case,
    bench_cases=(
        _case("32768x768", 32768, 768, dtypes=(torch.bfloat16,)),
        _case("8192x768", 8192, 768, dtypes=(torch.bfloat16,)),
        _case("8192x1024", 8192, 1024, dtypes=(torch.bfloat16,)),
    ),
    bench_cases_cpu=(_case("1024x768", 1024, 768, dtypes=_SINGLE),),
    forward_cost=lambda case, dtype: _cost(case, dtype, 1),
    backward_cost=lambda case, dtype: _cost(case, dtype, 2),
    gradients_in_forward=True,
    peers=torch_peers(_torch_loss),
    bad_calls=BAD_CALLS,
    mutants={
        "keys one late": _one_late,
        "without temperature": _without_temperature,
        "without negatives": _without_negatives,
        "one direction": _one_direction,
    },
)
