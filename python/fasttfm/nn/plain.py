"""Which modules a fused op may replace: one rule for ``fasttfm.nn``, ``fasttfm.models`` and ``fasttfm.patch``.

A fused op reads the parameters of several modules and calls none of them. That gives the same result only if each
module is plain: it is of a known class, has no hooks, its forward is not replaced, and its parameters are plain
tensors. A module that is not plain is called, as torch does.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook

from fasttfm import ops
from fasttfm.nn.layer_norm import LayerNorm, RMSNorm
from fasttfm.ops.core.library import PLAIN_TENSORS

Condition = Callable[[Any], bool] | None  # None for no condition


def _of_the_last_dimension(norm: nn.LayerNorm | RMSNorm) -> bool:
    return len(norm.normalized_shape) == 1


def _has_an_epsilon(norm: RMSNorm) -> bool:
    return _of_the_last_dimension(norm) and norm.eps is not None


def _looks_rows_up(table: nn.Embedding) -> bool:
    return table.max_norm is None and not table.scale_grad_by_freq and not table.sparse


# The classes whose formula the ops implement, and a condition for their modules. Subclasses are not included, because
# their forward may differ.
_CLASSES: dict[type, Condition] = {
    nn.Linear: None,
    NonDynamicallyQuantizableLinear: None,
    nn.LayerNorm: _of_the_last_dimension,
    LayerNorm: _of_the_last_dimension,
    RMSNorm: _has_an_epsilon,
    nn.Embedding: _looks_rows_up,
    nn.Dropout: None,
    nn.Identity: None,
    nn.ReLU: None,
    nn.GELU: None,
    nn.SiLU: None,
}
# The types of a plain module's parameters: tensors, a tracer's tensors, or None. DTensors and quantized tensors are not
# included, because they implement their own GEMMs.
_PARAMETERS = (*PLAIN_TENSORS, FakeTensor, FunctionalTensor, type(None))


def register_plain_class(kind: type, condition: Condition = None) -> None:
    """Registers a class of modules whose formula the ops implement; ``condition`` restricts it to some modules."""
    _CLASSES[kind] = condition


def is_plain(*modules: Any) -> bool:
    """Whether all modules are plain, so that a fused op may read their parameters instead of calling them."""
    if _has_any_global_hook():
        return False
    for module in modules:
        kind = type(module)
        if kind not in _CLASSES or is_watched(module):
            return False
        if not _are_plain_tensors(module):
            return False
        condition = _CLASSES[kind]
        if condition is not None and not condition(module):
            return False
    return True


def has_plain_tensors(module: nn.Module) -> bool:
    """Whether a fused op may read the tensors of a module of a class that it knows, instead of calling it."""
    return not _has_any_global_hook() and not is_watched(module) and _are_plain_tensors(module)


def _are_plain_tensors(module: nn.Module) -> bool:
    attributes = module.__dict__  # where a tensor is that has replaced a parameter
    return (
        "weight" not in attributes
        and "bias" not in attributes
        and all(type(tensor) in _PARAMETERS for tensor in attributes["_parameters"].values())
    )


def is_plain_linear(*modules: Any) -> bool:
    """Whether all are plain and linear layers, with a weight to read: another plain module may have replaced one."""
    return is_plain(*modules) and all(
        "weight" in module._parameters and not isinstance(module, (nn.LayerNorm, RMSNorm, nn.Embedding))
        for module in modules
    )


def is_plain_norm(*modules: Any) -> bool:
    """Whether all are plain and LayerNorms, with a weight to read: another plain module may have replaced one."""
    return is_plain(*modules) and all(isinstance(module, nn.LayerNorm) for module in modules)


def is_plain_rms_norm(*modules: Any) -> bool:
    """Whether all are plain and RMSNorms."""
    return is_plain(*modules) and all(isinstance(module, RMSNorm) for module in modules)


def is_plain_dropout(*modules: Any) -> bool:
    """Whether all are plain and have a ``dropout_rate``: another plain module may have replaced one."""
    return is_plain(*modules) and all(isinstance(module, (nn.Dropout, nn.Identity)) for module in modules)


def is_watched(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class's forward: it has hooks, a compiled call or a replaced
    forward."""
    attributes = module.__dict__
    return bool(
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
        or "_compiled_call_impl" in attributes
    )


_weight_and_bias = operator.itemgetter("weight", "bias")
_PLAIN = frozenset((*PLAIN_TENSORS, type(None)))


def plain_parameters(owners: list[dict[str, Any]]) -> list[Tensor | None] | None:
    """The weight and the bias in each of the modules' dictionaries of parameters, in one list; None if one is missing
    or is not a plain tensor."""
    try:
        values = list(itertools.chain.from_iterable(map(_weight_and_bias, owners)))
    except KeyError:
        return None
    return values if _PLAIN.issuperset(map(type, values)) else None


class Uncopied:
    """A module's cache about other modules: None in a copy or a pickle, where it would describe the original."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Tree(Uncopied):
    """A snapshot of the modules below a module. Results that depend on them stay valid while ``is_unchanged`` is true.

    Args:
        root: The module. Its own hooks do not matter, because its caller runs them.
        is_idle: Whether a module's forward hooks currently do nothing.
    """

    def __init__(self, root: nn.Module, is_idle: Callable[[dict[int, Any]], bool] = lambda hooks: False) -> None:
        self._root, self._is_idle = weakref.ref(root), is_idle  # weakly, because a module holds its snapshot
        self._children = dict(root._modules)
        modules = [module for module in root.modules() if module is not root]
        self._nodes = [(module, module.__dict__, type(module), dict(module._modules)) for module in modules]

    @property
    def root(self) -> Any:
        return self._root()

    def is_unchanged(self) -> bool:
        """Whether the tree has the same modules, of the same classes, and no module is watched."""
        root = self._root()
        if _has_any_global_hook() or root is None or root._modules != self._children:
            return False
        for module, attributes, kind, children in self._nodes:  # a loop without calls: it runs before every forward
            if (
                module.__class__ is not kind
                or (attributes["_forward_hooks"] and not self._is_idle(attributes["_forward_hooks"]))
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
                or attributes["_modules"] != children
                or "forward" in attributes
                or "_compiled_call_impl" in attributes
            ):
                return False
        return True


def has_own_forward(module: nn.Module) -> bool:
    """Whether the module's ``forward`` is replaced, as Accelerate does to offload modules."""
    return "forward" in module.__dict__


# ---- activations and dropout -----------------------------------------------------------------------------------------

# torch's functions and module classes, and the name of their activation in ops.
_ACTIVATIONS: dict[Any, str] = {
    functional.relu: "relu",
    torch.relu: "relu",
    nn.ReLU: "relu",
    functional.gelu: "gelu",
    functional.silu: "silu",
    nn.SiLU: "silu",
}


def register_activation(kind: type[nn.Module], name: str) -> None:
    """Registers a class of modules that compute the activation ``name`` of ops."""
    if name not in ops.ACTIVATIONS:
        raise ValueError(f"register_activation: name: expected one of {', '.join(ops.ACTIVATIONS)}, got {name!r}")
    _ACTIVATIONS.setdefault(kind, name)
    register_plain_class(kind)


def activation_name(activation: Callable[[Tensor], Tensor]) -> str | None:
    """The name in ops of an activation, which is a function or a plain module; None if it has to be called."""
    if isinstance(activation, nn.Module) and not is_plain(activation):
        return None
    return known_activation_name(activation)


def known_activation_name(activation: Any) -> str | None:
    """The same for a module that is known to be plain."""
    if not isinstance(activation, nn.Module):
        return _ACTIVATIONS.get(activation)
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    return _ACTIVATIONS.get(type(activation))


def dropout_rate(dropout: nn.Dropout | nn.Identity) -> float:
    """The dropout probability of a plain module; an Identity may replace a Dropout."""
    return float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0
