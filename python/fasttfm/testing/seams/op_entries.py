"""Entry points of all ops, from their specs: the typical case, and the first one with boundaries of sequences."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.testing.call import backends_on
from fasttfm.testing.harness import SEED, draw_inputs
from fasttfm.testing.seams.boundaries import BOUND, boundaries_of
from fasttfm.testing.seams.entry import EntryPoint, Inputs, Tensors, as_leaves, with_gradients
from fasttfm.testing.spec import OpCase, OpSpec, outputs_of
from fasttfm.testing.specs import every_spec

# Public names of fasttfm.ops that have no entry point.
EXCEPTIONS = {
    "ops.ACTIVATIONS": "a tuple of names",
    "ops.CountedLoss": "a result",
    "ops.check_errors": "reads what the ops have recorded",
    "ops.fuse_qkv": "concatenates parameters; nothing is kept",
    "ops.log_distance_rows": "a table of its arguments, which ops.disentangled_attention's entry point makes",
}


LEFT_OUT = {
    "unpack": {"max_seqlen": "the size of its result"},
    "disentangled_attention": {"fork": "torch's products add in another order in a child, which has one thread"},
}


def _dtype(case: OpCase, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" and torch.bfloat16 in case.dtypes else case.dtypes[0]


def _inputs(spec: OpSpec, case: OpCase, seed: int, device: torch.device) -> Inputs:
    """Tensors of the spec, and ``max_seqlen``, which boundaries.py changes. Boundaries are those of the case for every
    seed."""
    inputs: Inputs = dict(draw_inputs(spec, case, _dtype(case, device), device, SEED + seed).items())
    if case.options.get(BOUND) is not None:
        inputs[BOUND] = case.options[BOUND]
    return inputs


def _call(spec: OpSpec, case: OpCase, backend: str | None, _: Any, inputs: Inputs) -> Tensors:
    leaves = as_leaves(inputs, spec.differentiable)
    results = _run(spec, functools.partial(spec.function, backend=backend), case, leaves)
    others = {name: value for name, value in leaves.items() if name not in spec.differentiable}
    changed = {name: value for name, value in others.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {**results, **{f"written {name}": value for name, value in changed.items()}}


def _reference(spec: OpSpec, case: OpCase, _: Any, inputs: Inputs) -> Tensors:
    return _run(spec, spec.reference, case, as_leaves(inputs, spec.differentiable))


def _run(spec: OpSpec, function: Any, case: OpCase, leaves: Inputs) -> Tensors:
    options = {name: value for name, value in case.options.items() if name not in leaves}
    outputs = outputs_of(function(**leaves, **options))
    named = {f"output{index}": output for index, output in enumerate(outputs)}
    return with_gradients(named, {name: leaves[name] for name in spec.differentiable if _is_present(leaves, name)})


def _is_present(inputs: Inputs, name: str) -> bool:
    return isinstance(inputs.get(name), Tensor)


def _cases(spec: OpSpec) -> list[OpCase]:
    """The typical case, and the first one with boundaries, also the first one with a bound of lengths."""
    device = torch.device("cpu")
    cases = {spec.cases[0].name: spec.cases[0]}
    if "cu_seqlens" in "".join(inspect.signature(spec.function).parameters):
        packed = [case for case in spec.cases if boundaries_of(_inputs(spec, case, 0, device))]
        bounded = [case for case in packed if BOUND in case.options]
        cases |= {case.name: case for case in (*packed[:1], *bounded[:1])}
    return list(cases.values())


def _backends(spec: OpSpec, device: str) -> list[str | None]:
    """On a GPU the one that a call without a request gets, and the others; on a CPU the first one: not Triton's
    interpreter, which is a tool for tests and runs in one thread."""
    names = [name for name in backends_on(spec, device) if name != "reference"]
    if device == "cuda":
        return [None, *names[1:]]
    return [next((name for name in names if name != "triton"), "reference")]


def op_entries(device: str) -> list[EntryPoint]:
    entries = []
    for spec in every_spec():
        for case, backend in itertools.product(_cases(spec), _backends(spec, device)):
            parts = ([] if case is spec.cases[0] else [case.name]) + ([backend] if backend and device == "cuda" else [])
            entries.append(
                EntryPoint(
                    name=", ".join([f"ops.{spec.name}", *parts]),
                    covers=(f"ops.{spec.name}",),
                    make=lambda _: None,
                    inputs=functools.partial(_inputs, spec, case),
                    call=functools.partial(_call, spec, case, backend),
                    reference=functools.partial(_reference, spec, case),
                    left_out=LEFT_OUT.get(spec.name, {}),
                )
            )
    return [*entries, *_helper_entries()]


# ---- public functions without a spec ---------------------------------------------------------------------------------

_LENGTHS = (5, 1, 7)


def _helper_inputs(seed: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    lengths = [_LENGTHS[(index + seed) % 3] for index in range(3)]
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).to(device)
    qk = [torch.randn(2, 6, 2, 16, generator=generator).to(device) for _ in range(2)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return {"mask": mask, "q": qk[0], "k": qk[1], "bounds": bounds, "lengths": torch.tensor(lengths).to(device)}


def _helpers() -> dict[str, Any]:
    return {
        "attention_weights": lambda inputs: ops.attention_weights(inputs["q"], inputs["k"]),
        "cu_seqlens_from_lengths": lambda inputs: ops.cu_seqlens_from_lengths(inputs["lengths"]),
        "cu_seqlens_from_mask": lambda inputs: ops.cu_seqlens_from_mask(inputs["mask"]),
        "position_ids_from_cu_seqlens": lambda inputs: ops.position_ids_from_cu_seqlens(inputs["bounds"], total=13),
        "token_indices_from_mask": lambda inputs: ops.token_indices_from_mask(inputs["mask"]),
    }


def _call_helper(run: Any, _: Any, inputs: Inputs) -> Tensors:
    return {"output": run(inputs).detach()}


def _helper_entries() -> list[EntryPoint]:
    return [
        EntryPoint(
            name=f"ops.{name}",
            covers=(f"ops.{name}",),
            make=lambda _: None,
            inputs=_helper_inputs,
            call=functools.partial(_call_helper, run),
        )
        for name, run in _helpers().items()
    ]
