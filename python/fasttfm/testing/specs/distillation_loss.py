"""distillation_loss: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.distillation_loss import reference
from fasttfm.ops import distillation_loss
from fasttfm.testing.random_sizes import random_scale, random_shape, random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, spoil, triton_kernels
from fasttfm.testing.vocabulary_cases import cost, loss_case


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    *leading, columns = case.sizes["shape"]
    vocabulary, width = case.sizes["vocabulary"], case.sizes.get("teacher")  # None: logits are given
    scale, biased = case.sizes.get("scale", 1.0), case.sizes.get("bias", True)

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return draw(generator, *sizes, dtype=dtype, device=device, scale=scale)

    positions, count = case.sizes.get("positions"), torch.Size(leading).numel()
    if isinstance(positions, int):
        positions = torch.randperm(count, generator=generator)[:positions].sort().values.tolist()
    selected = None if positions is None else torch.tensor(positions, dtype=torch.int64, device=device)
    shape = tuple(leading) if selected is None else tuple(selected.shape)
    mask = (torch.rand(shape, generator=generator) < case.sizes["share"]).to(device) if "share" in case.sizes else None
    teacher = tensor(*leading, width or vocabulary, scale=1.0 if width else scale)
    return {
        "student_hidden": tensor(*leading, columns),
        "student_weight": tensor(vocabulary, columns, scale=scale * columns**-0.5),
        "student_bias": tensor(vocabulary, scale=scale) if biased else None,
        "teacher": teacher,
        "teacher_weight": tensor(vocabulary, width, scale=scale * width**-0.5) if width else None,
        "teacher_bias": tensor(vocabulary, scale=scale) if biased and width else None,
        "positions": selected,
        "mask": mask,
    }


def _case(name: str, *shape: int, vocabulary: int, options: dict[str, Any] | None = None, **sizes: Any) -> OpCase:
    return loss_case(name, *shape, vocabulary=vocabulary, options={"temperature": 1.0, **(options or {})}, **sizes)


_SINGLE = (torch.float32,)
CASES = (
    _case("typical", 3, 5, 32, vocabulary=57, teacher=48, options={"temperature": 2.0}),
    _case("logits", 3, 5, 32, vocabulary=57, options={"temperature": 0.7}),
    _case("predicted_rows", 3, 5, 32, vocabulary=57, teacher=48, positions=6),
    _case("predicted_rows_of_logits", 9, 32, vocabulary=57, positions=(4, 2, 2, 8), share=0.7),
    _case("masked", 3, 5, 32, vocabulary=24, teacher=16, share=0.6, options={"reduction": "sum"}),
    _case("none", 2, 3, 32, vocabulary=24, teacher=16, share=0.6, options={"reduction": "none", "temperature": 3.0}),
    _case("no_bias", 7, 33, vocabulary=51, teacher=20, bias=False),
    _case("nothing_counts", 7, 16, vocabulary=12, teacher=20, share=0.0, dtypes=_SINGLE),
    _case("no_rows", 0, 16, vocabulary=12, teacher=20, dtypes=_SINGLE),
    _case("one_word", 4, 16, vocabulary=1, teacher=20, dtypes=_SINGLE),
    _case("large_logits", 6, 32, vocabulary=40, teacher=32, scale=100.0),
    _case("long_rows", 3, 16, vocabulary=4500),
)


def _random_case(source: random.Random) -> OpCase:
    *leading, columns = random_shape(source, largest=96)
    rows = math.prod(leading)
    positions = tuple(source.randrange(rows) for _ in range(source.randint(0, rows))) if rows else ()
    options = {"reduction": source.choice(("mean", "sum", "none")), "temperature": source.choice((0.5, 1.0, 3.0))}
    masked = {"share": source.choice((0.0, 0.5, 1.0))} if source.random() < 0.5 else {}
    return _case(
        "random",
        *leading,
        columns,
        vocabulary=random_size(source, 300),
        options=options,
        teacher=source.choice((None, random_size(source, 64))),
        bias=source.random() < 0.6,
        scale=random_scale(source),
        positions=source.choice((None, positions)),
        **masked,
    )


def _cost(case: OpCase, dtype: torch.dtype, backward: bool) -> Cost:
    *leading, columns = case.sizes["shape"]
    rows, vocabulary, width = case.sizes.get("positions") or leading[0], case.sizes["vocabulary"], case.sizes["teacher"]
    student = cost(rows, columns, vocabulary, dtype, 2 if backward else 1)
    teacher = cost(rows, width, vocabulary, dtype, 0 if backward else 1)
    return Cost(student.bytes + teacher.bytes, student.flops + teacher.flops)


def _torch_loss(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    functional, temperature = torch.nn.functional, options["temperature"]

    def call() -> Tensor:
        hidden, teacher = inputs["student_hidden"], inputs["teacher"]
        if inputs["positions"] is not None:
            hidden, teacher = hidden[inputs["positions"]], teacher[inputs["positions"]]
        student = functional.linear(hidden, inputs["student_weight"], inputs["student_bias"]).float()
        with torch.no_grad():
            target = functional.linear(teacher, inputs["teacher_weight"], inputs["teacher_bias"]).float()
        log_p = functional.log_softmax(student / temperature, dim=-1)
        q = functional.softmax(target / temperature, dim=-1)
        return functional.kl_div(log_p, q, reduction="batchmean") * temperature**2

    return call


BAD_CALLS = (
    BadCall("hidden is a list", "student_hidden", TypeError, spoil("student_hidden", [1.0])),
    BadCall("weight of other columns", "student_weight", ValueError, spoil("student_weight", torch.ones(57, 31))),
    BadCall("bias too long", "student_bias", ValueError, spoil("student_bias", torch.ones(58))),
    BadCall("teacher of other rows", "teacher", ValueError, spoil("teacher", torch.ones(3, 6, 48))),
    BadCall("logits of another vocabulary", "teacher", ValueError, spoil("teacher_weight", None)),
    BadCall("teacher of another vocabulary", "teacher_weight", ValueError, spoil("teacher_weight", torch.ones(56, 48))),
    BadCall("teacher_bias too short", "teacher_bias", ValueError, spoil("teacher_bias", torch.ones(56))),
    BadCall("a position too large", "positions", ValueError, spoil("positions", torch.tensor([15]))),
    BadCall("mask of another shape", "mask", ValueError, spoil("mask", torch.ones(15))),
    BadCall("mask is a list", "mask", TypeError, spoil("mask", [1])),
    BadCall("temperature 0", "temperature", ValueError, spoil("temperature", 0.0)),
    BadCall("unknown reduction", "reduction", ValueError, spoil("reduction", "batchmean")),
    BadCall("total is text", "total", TypeError, spoil("total", "all")),
)


def _other_way_round(**arguments: Any) -> Tensor:
    """KL(student || teacher)."""
    logits = torch.nn.functional.linear
    temperature = arguments["temperature"]
    s = logits(arguments["student_hidden"], arguments["student_weight"], arguments["student_bias"]) / temperature
    t = logits(arguments["teacher"], arguments["teacher_weight"], arguments["teacher_bias"]) / temperature
    losses = (s.softmax(-1) * (s.log_softmax(-1) - t.log_softmax(-1))).sum(-1)
    return temperature**2 * losses.mean()


def _without_square(**arguments: Any) -> Tensor:
    return reference.distillation_loss(**arguments) / arguments["temperature"] ** 2


def _bench(rows: int, columns: int, width: int, dtypes: tuple[torch.dtype, ...]) -> OpCase:
    name = f"{rows}x{columns}x30522"
    options = {"temperature": 2.0}
    return _case(name, rows, columns, vocabulary=30522, teacher=width, bias=True, options=options, dtypes=dtypes)


SPEC = OpSpec(
    name="distillation_loss",
    function=distillation_loss,
    reference=reference.distillation_loss,
    inputs=_inputs,
    differentiable=("student_hidden", "student_weight", "student_bias"),
    cases=CASES,
    property_cases=("none", "masked", "typical"),
    torch_products=True,
    random_case=_random_case,
    bench_cases=(_bench(8192, 768, 768, (torch.bfloat16,)),),
    bench_cases_cpu=(_bench(128, 768, 768, (torch.float32,)),),
    forward_cost=lambda case, dtype: _cost(case, dtype, backward=False),
    backward_cost=lambda case, dtype: _cost(case, dtype, backward=True),
    gradients_in_forward=True,
    peers=torch_peers(_torch_loss),
    bad_calls=BAD_CALLS,
    mutants={"the other way round": _other_way_round, "without T^2": _without_square},
    triton_kernels=triton_kernels("distillation_loss", (30528, "bf16"), (30528, "fp32")),
)
