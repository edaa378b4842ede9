"""Says how a stack of layers runs: by which executor, with which fusions, in which steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fasttfm.ops.core.library import needs_gradient
from fasttfm.ops.layers import stack
from fasttfm.ops.layers.core_executor import plan_of, sizes_of
from fasttfm.ops.layers.lora import tensors_of
from fasttfm.ops.layers.rules import RULES, refused, situation_of
from fasttfm.ops.layers.spec import Specs
from fasttfm.ops.layers.steps import Range
from fasttfm.ops.layers.torch_executor import Inputs


@dataclass(frozen=True)
class PlanExplanation:
    """How a stack runs. Prints as a list."""

    chosen: str  # "core", or "ops" for torch's ops one by one
    refused: str | None  # why the core does not run the layers
    rules: dict[str, str | None]  # why a rule applies to none of the layers; None if it applies
    forward: tuple[str, ...]  # the kinds of the steps, of all layers
    backward: tuple[str, ...]  # empty without gradients

    def __str__(self) -> str:
        lines = [f"layers: {self.chosen}" + (f" (core: {self.refused})" if self.refused else "")]
        for rule in RULES:
            reason = self.rules[rule.name]
            lines.append(f"  {rule.name}: " + (f"{rule.does}" if reason is None else f"no: {reason}"))
        for direction, kinds in (("forward", self.forward), ("backward", self.backward)):
            if kinds:
                counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
                lines.append(f"  {direction}: {len(kinds)} steps: {counts}")
        return "\n".join(lines)


def explain(specs: Specs, inputs: Inputs, parameters: list[Tensor | None]) -> PlanExplanation:
    """How ``stack.run_stack`` runs a call. Nothing is computed."""
    training = needs_gradient(inputs.x, inputs.residual, *parameters, *tensors_of(inputs.pairs))
    why = stack.refused(specs, inputs, parameters)
    situation = situation_of(inputs, training=training)
    rules, sizes = {}, sizes_of(specs, inputs)
    for rule in RULES:
        reasons = [refused(rule, spec, situation, sizes) for spec in specs.kinds]
        rules[rule.name] = None if None in reasons else reasons[0]
    made: Any = plan_of(specs, inputs, training=training)
    kinds = [
        tuple(type(step).__name__ for step in steps if not isinstance(step, Range))
        for steps in (made.forward, made.backward)
    ]
    return PlanExplanation("ops" if why else "core", why, rules, *kinds)
