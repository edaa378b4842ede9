"""Entry points of optimizers and of training in FP8."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from fasttfm import optim
from fasttfm.models.families import FAMILIES
from fasttfm.nn import Fp8Training, PackedLayer, PackedTransformer
from fasttfm.testing.seams.entry import EntryPoint, Inputs, Tensors, as_leaves, copy_weights, with_gradients
from fasttfm.testing.seams.model_entries import head_of, inputs_of, small_model
from fasttfm.testing.seams.module_entries import bounds_of, rows, seeded
from fasttfm.train import optimizers

SHAPES = ((5, 7), (16,), (3, 4, 2))
_HELD = "an optimizer holds the parameters that it was made with"
_STATE = "a step changes the optimizer's state"
_HALF_MADE = "torch's AdamW, which it calls, keeps a state without moments"


def optimizer_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """All optimizers that the package defines, without those that need several processes (tests/train)."""
    classes = (value for module in (optim, optimizers) for value in vars(module).values() if isinstance(value, type))
    kinds = (kind for kind in classes if issubclass(kind, torch.optim.Optimizer))
    kinds = (kind for kind in kinds if not issubclass(kind, ZeroRedundancyOptimizer))
    return {kind.__name__: kind for kind in kinds if kind.__module__.startswith("fasttfm.")}


# ---- steps of an optimizer -------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """Parameters, or a model, and their optimizer."""

    model: Any
    optimizer: Any


class _Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)


OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05, "weight_decay": 0.1, "max_norm": 2.0},
    "Lamb": {"lr": 0.05, "weight_decay": 0.1},
}


def _optimizer(kind: type[torch.optim.Optimizer], device: torch.device) -> Trained:
    model = seeded(_Parameters, device)
    options: dict[str, Any] = OPTIONS.get(kind.__name__, {"lr": 0.05})
    return Trained(model, kind(list(model.parameters()), **options))


def _step_inputs(seed: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(400 + seed)
    names = [f"{name} {index}" for name in ("parameter", "gradient") for index in range(len(SHAPES))]
    drawn = [torch.randn(shape, generator=generator) for shape in (*SHAPES, *SHAPES)]
    return {name: value.to(device) for name, value in zip(names, drawn, strict=True)}


@torch.no_grad()
def _run_steps(trained: Trained, inputs: Inputs) -> Tensors:
    """Three steps from the parameters among the inputs, with an empty state."""
    parameters = list(trained.model.parameters())
    for state in trained.optimizer.state.values():
        for value in state.values():
            value.zero_()
    for index, parameter in enumerate(parameters):
        parameter.copy_(inputs[f"parameter {index}"])
        parameter.grad = inputs[f"gradient {index}"].to(parameter.dtype).clone()
    for _ in range(3):
        trained.optimizer.step()
    return {f"parameter {index}": parameter.detach().clone() for index, parameter in enumerate(parameters)}


def _adamw_steps(_: Any, inputs: Inputs) -> Tensors:
    """torch's AdamW with torch's clipping."""
    parameters = [nn.Parameter(inputs[f"parameter {index}"].clone()) for index in range(len(SHAPES))]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, foreach=False)
    for _ in range(3):
        for index, parameter in enumerate(parameters):
            parameter.grad = inputs[f"gradient {index}"].clone()
        nn.utils.clip_grad_norm_(parameters, 2.0)
        optimizer.step()
    return {f"parameter {index}": parameter.detach() for index, parameter in enumerate(parameters)}


def _rebuilt_optimizer(kind: type[torch.optim.Optimizer], trained: Trained, device: torch.device) -> Trained:
    model = seeded(_Parameters, device)
    copy_weights(trained.model, model)
    return Trained(model, kind(list(model.parameters()), **OPTIONS.get(kind.__name__, {"lr": 0.05})))


def optimizer_entries() -> list[EntryPoint]:
    changed = ("new parameters", "load_state_dict(assign=True)", "deep copy", "pickle", "separate copies")
    return [
        EntryPoint(
            name=f"optim.{name}",
            covers=(f"optim.{name}",),
            make=functools.partial(_optimizer, kind),
            inputs=_step_inputs,
            call=_run_steps,
            reference=_adamw_steps if name == "AdamW" else None,
            module=lambda trained: trained.model,
            rebuild=functools.partial(_rebuilt_optimizer, kind),
            sets_weights=True,
            left_out={
                **dict.fromkeys(changed, _HELD),
                **dict.fromkeys(("cast", "cast and cast back"), "parameters are fp32"),
                **dict.fromkeys(("threads of one object", "streams"), _STATE),
                **dict.fromkeys(("fake tensors first", "inference mode first"), "as torch's, it keeps its first state"),
                **({"failed allocations": _HALF_MADE} if name == "Muon" else {}),
            },
        )
        for name, kind in optimizer_classes().items()
    ]


# ---- a training step -------------------------------------------------------------------------------------------------


def _training(device: torch.device) -> Trained:
    family = next(iter(FAMILIES.values()))
    return _optimized(seeded(functools.partial(small_model, family), device))


def _optimized(model: Any) -> Trained:
    """With a learning rate of 0: every step of the model is the same."""
    options: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0, "weight_copies": True, "direct_gradients": True}
    return Trained(model, optim.AdamW(model.parameters(), **options))


def _rebuilt_training(trained: Trained, device: torch.device) -> Trained:
    family = next(iter(FAMILIES.values()))
    model = seeded(functools.partial(small_model, family), device)
    copy_weights(trained.model, model)
    return _optimized(model)


def _train_step(trained: Trained, inputs: Inputs) -> Tensors:
    """A step under autocast, with the optimizer's copies of weights, and gradients that the backward writes."""
    trained.optimizer.zero_grad()
    for parameter in trained.model.parameters():
        parameter.grad = None
    device = next(trained.model.parameters()).device
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = trained.model(**inputs).loss
    loss.backward()
    results = {"loss": loss.detach()}
    for name, parameter in trained.model.named_parameters():
        if parameter.grad is not None:
            results[f"d{name}"] = parameter.grad.detach().clone()
    trained.optimizer.step()
    return results


def training_entries() -> list[EntryPoint]:
    head = head_of(next(iter(FAMILIES.values())))
    shared = "gradients are added up in the parameters"
    copies = "an optimizer is not copied with its model"
    return [
        EntryPoint(
            name="optim.AdamW, a training step",
            covers=("optim.AdamW",),
            make=_training,
            inputs=functools.partial(inputs_of, head),
            call=_train_step,
            module=lambda trained: trained.model,
            rebuild=_rebuilt_training,
            refresh=lambda trained: trained.optimizer.refresh_copies(everything=True),
            left_out={
                **dict.fromkeys(("threads of one object", "streams"), shared),
                **dict.fromkeys(("deep copy", "pickle", "separate copies"), copies),
                **dict.fromkeys(("cast",), "fasttfm.optim.AdamW takes fp32 parameters"),
                **dict.fromkeys(("inference mode first", "fake tensors first"), "a step has a backward"),
                "alternating autocast": "a step sets autocast itself",
            },
        ),
        EntryPoint(
            name="nn.Fp8Training",
            covers=("nn.Fp8Training",),
            make=_fp8,
            inputs=_fp8_inputs,
            call=_fp8_call,
            module=lambda trained: trained.model,
            rebuild=_rebuilt_fp8,
            left_out={
                **dict.fromkeys(("threads of one object", "streams"), "a forward records magnitudes"),
                **dict.fromkeys(("deep copy", "pickle", "separate copies"), "a copy of a model is not trained in FP8"),
                **dict.fromkeys(
                    ("parameter.data changed in place", "parameter.data replaced", "a fused optimizer's step", "moved"),
                    "torch does not count these changes: update() after a step casts the weights again (docs/fp8.md)",
                ),
                **dict.fromkeys(("new parameters", "load_state_dict(assign=True)"), "it holds the parameters"),
                **dict.fromkeys(("cast", "cast and cast back"), "it holds the parameters' dtype"),
                "alternating autocast": "a step sets autocast itself",
            },
        ),
    ]


# ---- FP8 -------------------------------------------------------------------------------------------------------------


def _fp8_model() -> PackedTransformer:
    sizes: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
    return PackedTransformer([PackedLayer(64, 4, 128, **sizes) for _ in range(2)])


def _fp8(device: torch.device) -> Trained:
    model = seeded(_fp8_model, device)
    return Trained(model, Fp8Training(model))


def _rebuilt_fp8(trained: Trained, device: torch.device) -> Trained:
    model = seeded(_fp8_model, device)
    copy_weights(trained.model, model)
    return Trained(model, Fp8Training(model))


def _fp8_inputs(seed: int, device: torch.device) -> Inputs:
    bounds = bounds_of(device)
    return {"x": rows(seed, device, int(bounds[-1]), 64), "cu_seqlens": bounds, "max_seqlen": 6}


def _fp8_call(trained: Trained, inputs: Inputs) -> Tensors:
    leaves = as_leaves(inputs)
    device = leaves["x"].device
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y: Tensor = trained.model(leaves["x"], leaves["cu_seqlens"], leaves["max_seqlen"])
    return with_gradients({"y": y}, {"x": leaves["x"], **dict(trained.model.named_parameters())})


def all_training_entries() -> list[EntryPoint]:
    return list(itertools.chain(optimizer_entries(), training_entries()))
