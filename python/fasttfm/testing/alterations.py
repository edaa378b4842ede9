"""Alterations of a model's modules: hooks, wrappers, adapters, parametrizations.

Each alteration changes the altered module's result, or records its calls. Applied to a module and to the module that it
replaces, an alteration must have the same effect on both: same outputs, same gradients, same calls.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

from fasttfm.testing.modules import Call, Results, run_module

Events = list[str]
Alteration = Callable[[nn.Module, str], Events]  # its arguments: a model, and the path of the module to alter


def _scaled(value: Any, factor: float) -> Any:
    """The value, or the first tensor of a tuple, times ``factor``."""
    if isinstance(value, Tensor):
        return value * factor
    return (value[0] * factor, *value[1:])


# ---- hooks -----------------------------------------------------------------------------------------------------------


def forward_hook(model: nn.Module, path: str) -> Events:
    events: Events = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        events.append(str(tuple(args[0].shape)))
        return _scaled(output, 1.5)

    model.get_submodule(path).register_forward_hook(hook)
    return events


def forward_hook_with_kwargs(model: nn.Module, path: str) -> Events:
    events: Events = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        events.append("called")
        return _scaled(output, 1.5)

    model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    return events


def pre_hook(model: nn.Module, path: str) -> Events:
    events: Events = []

    def hook(module: nn.Module, args: Any) -> Any:
        events.append(str(tuple(args[0].shape)))
        return _scaled(args, 1.25)

    model.get_submodule(path).register_forward_pre_hook(hook)
    return events


def pre_hook_with_kwargs(model: nn.Module, path: str) -> Events:
    events: Events = []

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        events.append("called")
        return _scaled(args, 1.25), kwargs

    model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    return events


def full_backward_hook(model: nn.Module, path: str) -> Events:
    events: Events = []

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        events.append(str(tuple(grad_output[0].shape)))
        return tuple(None if gradient is None else 2 * gradient for gradient in grad_input)

    model.get_submodule(path).register_full_backward_hook(hook)
    return events


def full_backward_pre_hook(model: nn.Module, path: str) -> Events:
    events: Events = []

    def hook(module: nn.Module, grad_output: Any) -> Any:
        events.append("called")
        return tuple(None if gradient is None else 2 * gradient for gradient in grad_output)

    model.get_submodule(path).register_full_backward_pre_hook(hook)
    return events


HOOKS: dict[str, Alteration] = {
    "forward hook": forward_hook,
    "forward hook with kwargs": forward_hook_with_kwargs,
    "pre-hook": pre_hook,
    "pre-hook with kwargs": pre_hook_with_kwargs,
    "full backward hook": full_backward_hook,
    "full backward pre-hook": full_backward_pre_hook,
}


@contextlib.contextmanager
def global_forward_hook() -> Iterator[Events]:
    """A global hook that records the classes of the called modules, except for attention's output projections: torch
    reads their weights without calling them."""
    events: Events = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            events.append(type(module).__name__)

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield events
    finally:
        handle.remove()


# ---- replaced modules ------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A module with an additional low-rank product, like LoRA's: it also exposes the weight of the module that it
    wraps."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.base_layer = base
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(base.out_features, 2, generator=generator, dtype=torch.float64))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        return y + x @ self.a.t() @ self.b.t()


def _replace(model: nn.Module, path: str, make: Callable[[Any], Any]) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))


def low_rank(model: nn.Module, path: str) -> Events:
    _replace(model, path, LowRank)
    return []


def subclass(model: nn.Module, path: str) -> Events:
    """A subclass that overrides ``forward``."""
    module, events = model.get_submodule(path), []  # type: tuple[nn.Module, Events]
    kind = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        events.append("called")
        return _scaled(kind.forward(self, *args, **kwargs), 1.5)

    module.__class__ = type("Own", (kind,), {"forward": forward})
    return events


def own_forward(model: nn.Module, path: str) -> Events:
    """A ``forward`` attribute of the instance, as Accelerate sets."""
    module, events = model.get_submodule(path), []  # type: tuple[Any, Events]
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        events.append("called")
        return _scaled(original(*args, **kwargs), 1.5)

    module.forward = forward
    return events


def checkpointed(model: nn.Module, path: str) -> Events:
    _replace(model, path, checkpoint_wrapper)
    return []


def compiled(model: nn.Module, path: str) -> Events:
    _replace(model, path, lambda module: torch.compile(module, backend="eager"))
    return []


MODULES: dict[str, Alteration] = {"subclass": subclass, "own forward": own_forward, "checkpoint_wrapper": checkpointed}


# ---- other parameters ------------------------------------------------------------------------------------------------


def weight_norm(model: nn.Module, path: str) -> Events:
    module: Any = parametrizations.weight_norm(model.get_submodule(path))
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(1.5)
    return []


def hooked_weight_norm(model: nn.Module, path: str) -> Events:
    """torch's older weight norm, which computes the weight in a pre-hook."""
    with _without_warnings():
        module: Any = nn.utils.weight_norm(model.get_submodule(path))
    with torch.no_grad():
        module.weight_g.mul_(1.5)
    return []


def spectral_norm(model: nn.Module, path: str) -> Events:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        parametrizations.spectral_norm(model.get_submodule(path))
    return []


def pruned(model: nn.Module, path: str) -> Events:
    module: Any = model.get_submodule(path)
    prune.l1_unstructured(module, "weight", 0.5)
    with torch.no_grad():
        module.weight_orig.mul_(1.5)
    return []


class Tripled(Tensor):
    """A tensor subclass whose products are three times those of its values."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is nn.functional.linear:
            return result.as_subclass(Tensor) * 3
        return result


def tensor_subclass(model: nn.Module, path: str) -> Events:
    module: Any = model.get_submodule(path)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Tripled))
    return []


def frozen(model: nn.Module, path: str) -> Events:
    for parameter in list(model.get_submodule(path).parameters())[:1]:
        parameter.requires_grad_(False)
    return []


LINEAR: dict[str, Alteration] = {
    "LoRA": low_rank,
    "weight_norm": weight_norm,
    "weight_norm by hook": hooked_weight_norm,
    "spectral_norm": spectral_norm,
    "prune": pruned,
    "tensor subclass": tensor_subclass,
    "frozen weight": frozen,
}


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- the comparison --------------------------------------------------------------------------------------------------


def alterations_of(module: nn.Module, paths: tuple[str, ...]) -> dict[str, tuple[Alteration, str]]:
    """Every alteration that applies to the modules at ``paths``; the keys name the alteration and the path."""
    alterations = {}
    for path in paths:
        kinds = HOOKS | ({} if path == "" else MODULES)
        if isinstance(module.get_submodule(path), nn.Linear):
            kinds = kinds | LINEAR
        alterations.update({f"{path or 'itself'}: {name}": (alter, path) for name, alter in kinds.items()})
    return alterations


def check_altered(
    ours: nn.Module,
    theirs: nn.Module,
    call: Call,
    inputs: Mapping[str, Tensor],
    alteration: tuple[Alteration, str] | None = None,
) -> None:
    """Checks that both modules, in fp64, have the same outputs, gradients and recorded calls with an alteration."""
    results, events = [], []
    for module in (ours.double(), theirs.double()):
        events.append(None if alteration is None else alteration[0](module, alteration[1]))
        results.append(run_module(module, call, inputs))
    check_equal(*results)
    assert events[0] == events[1], f"calls: {events[0]}, expected {events[1]}"


def check_equal(results: Results, expected: Results) -> None:
    for kind in ("outputs", "gradients"):
        torch.testing.assert_close(getattr(results, kind), getattr(expected, kind))


def check_copies(module: nn.Module, call: Call, inputs: Mapping[str, Tensor]) -> None:
    """Checks that copies and unpickled modules compute the same and share no memory with the module."""
    expected = run_module(module, call, inputs)
    for duplicate in (copy.deepcopy, lambda original: pickle.loads(pickle.dumps(original))):
        twin = duplicate(module)
        assert [type(part) for part in twin.modules()] == [type(part) for part in module.modules()]
        check_equal(run_module(twin, call, inputs), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        check_equal(run_module(module, call, inputs), expected)
