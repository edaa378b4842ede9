"""replaced_token_loss: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer, compiled
from fasttfm.kernels.replaced_token_loss import reference
from fasttfm.ops import replaced_token_loss
from fasttfm.testing.random_sizes import random_scale, random_shape
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, op_case, spoil


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = case.sizes["shape"]
    share, lengths = case.sizes.get("share"), case.sizes.get("lengths")
    logits = draw(generator, *shape, dtype=dtype, device=device, scale=case.sizes.get("scale", 2.0))
    labels = torch.rand(shape, generator=generator) < 0.15
    return {
        "logits": logits.t() if case.sizes.get("transposed") else logits,
        "labels": (labels.t() if case.sizes.get("transposed") else labels).to(device),
        "mask": None if share is None else (torch.rand(shape, generator=generator) < share).to(device),
        "lengths": None if lengths is None else torch.tensor(lengths, dtype=torch.int64, device=device),
    }


def _case(name: str, *shape: int, reduction: str = "mean", **sizes: Any) -> OpCase:
    return op_case(name, {"reduction": reduction}, shape=shape, **sizes)


CASES = (
    _case("typical", 3, 17, share=0.7),
    _case("packed", 29),
    _case("sum", 3, 17, share=0.7, reduction="sum"),
    _case("none", 3, 17, share=0.7, reduction="none"),
    _case("lengths", 3, 17, lengths=(5, 0, 17)),
    _case("mask_and_lengths", 3, 17, share=0.5, lengths=(5, 2, 16)),
    _case("nothing_counts", 3, 17, share=0.0),
    _case("no_tokens", 0),
    _case("large", 3, 17, scale=300.0),
    _case("transposed", 6, 9, transposed=True),
)


def _random_case(source: random.Random) -> OpCase:
    *shape, _ = random_shape(source, dimensions=3)
    lengths = tuple(source.randint(0, shape[1]) for _ in range(shape[0]))
    return _case(
        "random",
        *shape,
        reduction=source.choice(("mean", "sum", "none")),
        share=source.choice((None, 0.0, 0.3, 1.0)),
        lengths=source.choice((None, lengths)),
        scale=random_scale(source),
    )


def _cost(case: OpCase, dtype: torch.dtype) -> Cost:
    tokens = torch.Size(case.sizes["shape"]).numel()
    return Cost(bytes=tokens * (2 * dtype.itemsize + 2))


def _torch_loss(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """As transformers' discriminator does it: the tokens that count are selected, which synchronizes with the GPU."""
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    logits, labels, mask = inputs["logits"], inputs["labels"], inputs["mask"]
    return lambda: loss(logits[mask].float(), labels[mask].float())


def _torch_weighted(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    logits, labels, mask = inputs["logits"], inputs["labels"], inputs["mask"]
    return lambda: (loss(logits.float(), labels.float(), reduction="none") * mask).sum() / mask.sum()


BAD_CALLS = (
    BadCall("logits of integers", "logits", TypeError, spoil("logits", torch.ones(3, 17).long())),
    BadCall("logits of no dimension", "logits", ValueError, spoil("logits", torch.tensor(1.0))),
    BadCall("labels of another shape", "labels", ValueError, spoil("labels", torch.ones(3, 16).bool())),
    BadCall("labels of reals", "labels", TypeError, spoil("labels", torch.ones(3, 17))),
    BadCall("labels missing", "labels", TypeError, spoil("labels", None)),
    BadCall("mask of another shape", "mask", ValueError, spoil("mask", torch.ones(17).bool())),
    BadCall("mask elsewhere", "mask", ValueError, spoil("mask", torch.ones(3, 17, device="meta"))),
    BadCall("lengths of reals", "lengths", TypeError, spoil("lengths", torch.ones(3))),
    BadCall("one length too many", "lengths", ValueError, spoil("lengths", torch.ones(4).long())),
    BadCall("unknown reduction", "reduction", ValueError, spoil("reduction", "average")),
    BadCall("total is negative", "total", ValueError, spoil("total", -3)),
)


def _padding_counts(**arguments: Any) -> Tensor:
    return reference.replaced_token_loss(**{**arguments, "mask": None, "lengths": None})


def _other_class(**arguments: Any) -> Tensor:
    return reference.replaced_token_loss(**{**arguments, "labels": ~arguments["labels"]})


SPEC = OpSpec(
    name="replaced_token_loss",
    function=replaced_token_loss,
    reference=reference.replaced_token_loss,
    inputs=_inputs,
    differentiable=("logits",),
    cases=CASES,
    property_cases=("typical", "none"),
    random_case=_random_case,
    bench_cases=(_case("64x512", 64, 512, share=0.6, dtypes=(torch.bfloat16,)),),
    bench_cases_cpu=(_case("8x128", 8, 128, share=0.6, dtypes=(torch.float32,)),),
    forward_cost=_cost,
    backward_cost=_cost,
    peers=(
        Peer("torch", _torch_loss),
        Peer("torch weighted", _torch_weighted),
        Peer("torch.compile weighted", compiled(_torch_weighted)),
    ),
    bad_calls=BAD_CALLS,
    mutants={"padding counts": _padding_counts, "the other class": _other_class},
)
