"""``EntryPoint``: something that users call, in the form that the seams call it; and the comparison of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.testing.harness import same_bits

Tensors = dict[str, Tensor]
Inputs = dict[str, Any]  # tensors, and numbers such as max_seqlen


@dataclass(frozen=True)
class EntryPoint:
    """A public op, module, model, session or optimizer with small inputs.

    Args:
        name: The name that tests and the coverage list show, for example ``ops.layer_norm``.
        covers: The public names that it covers, for example ``ops.layer_norm``.
        make: Makes the object on a device: a module, a session; None for an op. Two calls make equal objects.
        inputs: The inputs of a call: the same sizes for every seed, other numbers.
        call: Calls the object with inputs. Returns outputs and gradients by name, detached.
        reference: What ``call`` should return, computed by other code. Half of the digits must agree with it.
        module: The module whose weights the object uses, if the object has weights.
        rebuild: Makes an object that has the weights of another one and no history: by default ``make`` and
            ``load_state_dict``.
        refresh: What the documentation tells users to call after a change of the weights.
        sets_weights: Whether a call starts from weights that are among its inputs, as an optimizer's does here.
        left_out: Seams that do not apply, with the reason.
        refuses: Seams that it does not support, with the text that the error must contain.
    """

    name: str
    make: Callable[[torch.device], Any]
    inputs: Callable[[int, torch.device], Inputs]
    call: Callable[[Any, Inputs], Tensors]
    covers: tuple[str, ...] = ()
    reference: Callable[[Any, Inputs], Tensors] | None = None
    module: Callable[[Any], nn.Module] | None = None
    rebuild: Callable[[Any, torch.device], Any] | None = None
    refresh: Callable[[Any], None] | None = None
    sets_weights: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def expected(self, seed: int, device: torch.device) -> Tensors:
        """The result of the first call of a new object, with nothing around it. It is computed once."""
        key = id(self), seed, str(device)
        if key not in _expected:
            _expected[key] = self, self.call(self.make(device), self.inputs(seed, device))
        return _expected[key][1]

    def fresh(self, subject: Any, device: torch.device) -> Any:
        """An object without a history that has the weights of ``subject``: what the next call of ``subject`` must
        agree with, whatever has happened to it."""
        if self.rebuild is not None:
            return self.rebuild(subject, device)
        twin = self.make(device)
        if self.module is not None:
            copy_weights(self.module(subject), self.module(twin))
        return twin


_expected: dict[tuple[int, int, str], tuple[EntryPoint, Tensors]] = {}


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Gives ``target`` new parameters and buffers with the numbers, dtypes and devices of those of ``source``;
    parameters that are one in ``source`` are one in ``target``."""
    new: dict[Tensor, nn.Parameter] = {}
    for name, parameter in source.named_parameters(remove_duplicate=False):
        if parameter not in new:
            new[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(target.get_submodule(owner), attribute, new[parameter])
    for name, buffer in source.named_buffers():
        owner, _, attribute = name.rpartition(".")
        target.get_submodule(owner)._buffers[attribute] = buffer.detach().clone()


# ---- calls -----------------------------------------------------------------------------------------------------------


def with_gradients(outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> Tensors:
    """The outputs, detached, and the gradients of the leaves. Incoming gradients depend only on sizes and are computed
    on the device, so that a CUDA graph can capture the call."""
    differentiable = [value for value in outputs.values() if value.requires_grad]
    differentiated = {name: value for name, value in leaves.items() if value.requires_grad}
    results = {name: value.detach() for name, value in outputs.items()}
    if differentiable and differentiated:
        incoming = [_incoming(value) for value in differentiable]
        gradients = torch.autograd.grad(differentiable, list(differentiated.values()), incoming, allow_unused=True)
        results |= {f"d{name}": g for name, g in zip(differentiated, gradients, strict=True) if g is not None}
    return results


def _incoming(output: Tensor) -> Tensor:
    numbers = torch.arange(output.numel(), device=output.device, dtype=torch.float32).add(1.0).cos()
    return numbers.to(output.dtype).view(output.shape)


def as_leaves(inputs: Mapping[str, Any], names: Iterable[str] | None = None) -> Inputs:
    """Copies of the inputs, so that calls that change their inputs can be repeated; floating-point ones (or ``names``)
    require gradients."""

    def prepared(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy = value.detach().clone()
        return copy.requires_grad_() if copy.is_floating_point() and (names is None or name in names) else copy

    return {name: prepared(name, value) for name, value in inputs.items()}


def tensors_of(output: Any) -> Tensors:
    """The tensors of a module's output by name: a tensor, a tuple, or an output of a model."""
    if isinstance(output, Tensor):
        return {"output": output}
    pairs = output.items() if hasattr(output, "items") else ((str(i), value) for i, value in enumerate(output))
    tensors: Tensors = {}
    for name, value in pairs:
        if isinstance(value, Tensor):
            tensors[str(name)] = value
    return tensors


# ---- comparisons -----------------------------------------------------------------------------------------------------


class SeamError(AssertionError):
    """An entry point breaks the promise of a seam."""


def check_same(results: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Names and bits are equal."""
    _check_names(results, expected, what)
    for name, value in expected.items():
        if not same_bits(results[name].detach(), value.detach()):
            raise SeamError(f"{what}: {name}: {_difference(results[name], value)}, expected the same bits")


def check_close(results: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Half of the digits are equal: rounding does not exceed this, and what a seam breaks (old weights, numbers of
    another call, memory that nothing has written) does. ``expected`` may have fewer results."""
    _check_names({name: value for name, value in results.items() if name in expected}, expected, what)
    for name, value in expected.items():
        got = results[name].detach()
        if not value.is_floating_point():
            agrees = torch.equal(got.cpu(), value.cpu())
        elif got.shape != value.shape:
            agrees = False
        else:
            coarse = max(torch.finfo(got.dtype).eps, torch.finfo(value.dtype).eps)
            bound = math.sqrt(coarse) * max(1e-3, _largest(value))
            agrees = got.numel() == 0 or _largest(got.double() - value.double()) <= bound
        if not agrees:
            raise SeamError(f"{what}: {name}: {_difference(got, value)}, expected half of the digits to agree")


def _check_names(results: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    if results.keys() != expected.keys():
        raise SeamError(f"{what}: the names of the results differ: {sorted(results.keys() ^ expected.keys())}")


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _difference(result: Tensor, expected: Tensor) -> str:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype} {tuple(result.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    if not result.is_floating_point():
        return f"{int((result != expected).sum())} of {result.numel()} integers differ"
    difference = _largest(result.double() - expected.double())
    return f"a difference of {difference:.3g} for numbers up to {_largest(expected):.3g}"


def chain(error: BaseException | None) -> str:
    """The texts of an error and of those that led to it."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return " ".join(texts)
