"""Registration with torch.library, and how ops meet torch's dispatcher and autograd, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Lives as long as the process: torch drops the registrations of a Library that is collected.
NAMESPACE = "fasttfm"  # tools/hub_kernel.py writes another
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_PLAIN_ARGUMENTS = frozenset((*PLAIN_TENSORS, type(None), torch.dtype))  # in the place of tensors and between them

is_compiling = torch.compiler.is_dynamo_compiling  # other tracers are dispatch modes
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functions_transform = torch._C._are_functorch_transforms_active
_jit_traces = torch._C._is_tracing
any_requires_grad = torch._C._any_requires_grad
_is_batched = torch._C._functorch.is_legacy_batchedtensor


# ---- registered ops --------------------------------------------------------------------------------------------------


class RegisteredOp:
    """An op as autograd functions call it.

    ``torch.ops`` is where torch.compile, fake tensors, dispatch modes, tensor subclasses and torch.jit.trace look. A
    plain eager call gains nothing there, but pays for the dispatcher's way into Python and back, which costs more than
    a small kernel: it calls the implementation directly.
    """

    def __init__(self, overload: Any, implementation: Callable[..., Any]) -> None:
        self.overload = overload
        self.implementation = implementation
        arguments = enumerate(overload._schema.arguments, start=1)
        self.tensors = max(place for place, argument in arguments if "Tensor" in str(argument.type))  # come first

    def __call__(self, *args: Any) -> Any:
        if is_plain(args[: self.tensors]):
            return self.implementation(*args)
        if not is_compiling() and _jit_traces() and list in map(type, args):  # torch records no list of bool
            raise _refusal(self.overload.name(), "torch.jit.trace", "torch.compile or torch.export")
        return self.overload(*args)

    def without_derivatives(self, keys: Any, *args: Any) -> Any:
        """What the dispatcher calls for autograd. Gradients come from an ``OpFunction``, which calls the op with
        autograd disabled: a derivative that is still required would be lost."""
        differentiated = torch.is_grad_enabled() and any_requires_grad(*args)
        if differentiated or (forward_ad._current_level >= 0 and any(map(_has_tangent, args))):
            asked = "derivatives in forward mode, by torch.func or in torch.jit.trace"
            raise _refusal(self.overload.name(), asked, "first derivatives by torch.autograd, or plain torch functions")
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(keys & torch._C._after_autograd_keyset, *args)


def bypass_dispatcher(args: Sequence[Any], *ops: RegisteredOp) -> list[Callable[..., Any]]:
    """The ops for calls whose tensors are ``args`` and results of calls on them: it is decided once for all of them
    whether they skip the dispatcher."""
    plain = is_plain(args)
    return [op.implementation if plain else op.overload for op in ops]


def is_plain(args: Sequence[Any]) -> bool:
    """Whether a call with these tensors and Nones, a tensor first, is a plain eager one: nothing traces or transforms
    it, and no dispatch mode or tensor subclass wants to see ops. All tensors of a call are on one device: the first
    tells whether they are meta tensors."""
    return (
        not is_compiling()
        and _dispatch_modes() == 0
        and not _transformed()
        and _PLAIN_ARGUMENTS.issuperset(map(type, args))
        and not args[0].is_meta
        and not _any_negative(args)
    )


def _any_negative(args: Sequence[Any]) -> bool:
    """Whether a tensor is a view that has the negative of its memory (``z.conj().imag``), which kernels would
    read without the sign. torch's dispatcher resolves it. It is made of complex numbers, not of parameters."""
    for each in args:  # noqa: SIM110  # this is part of every call, and a generator takes twice as long
        if type(each) is Tensor and each.is_neg():
            return True
    return False


def _transformed() -> bool:
    """Whether torch.func, forward mode or torch.jit.trace is at work. None of them can use an ``OpFunction``."""
    return forward_ad._current_level >= 0 or _functions_transform() or _jit_traces()


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> RegisteredOp:
    """Defines ``fasttfm::<schema>`` for CPU and CUDA tensors.

    ``schema`` is torch's schema text, for example ``"scale(Tensor x, float factor) -> Tensor"``; a tensor comes first.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CPU")
    _library.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = RegisteredOp(getattr(getattr(torch.ops, NAMESPACE), name).default, implementation)
    _library.impl(name, op.without_derivatives, "Autograd", with_keyset=True)
    return op


# ---- autograd --------------------------------------------------------------------------------------------------------


class OpFunction(torch.autograd.Function):
    """An op's autograd function: it gives first derivatives in reverse mode, for one incoming gradient at a time.

    Kernels return gradients that autograd cannot differentiate again: second derivatives (``create_graph``) raise a
    sentence, as batched gradients do.
    """

    op: ClassVar[str]
    instead: ClassVar[str | None]  # what has second derivatives; None where the op's own are right: it is linear
    # As apply(), for plain tensors where no function transform is at work: apply() spends half of its time on them.
    apply_plain: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.apply_plain = super(torch.autograd.Function, cls).apply  # type: ignore[misc]
        cls.backward = staticmethod(_once(cls, cls.backward))  # type: ignore[method-assign]


def _once(function: type[OpFunction], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward for one gradient at a time, which autograd does not differentiate."""

    def once(ctx: Any, *gradients: Any) -> Any:
        if not is_compiling():  # compiled functions refuse second derivatives by themselves
            if function.instead is not None and torch.is_grad_enabled():
                raise _refusal(function.op, "second derivatives (create_graph=True)", function.instead)
            for gradient in gradients:
                if gradient is not None and _is_batched(gradient):
                    raise _refusal(function.op, "batched gradients (is_grads_batched=True)", "one call for each")
        return backward(ctx, *gradients)

    return once


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether a call goes through its autograd function; one that autograd need not see skips that and its cost. Where
    the autograd function cannot be used, registered ops refuse derivatives."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return is_compiling() or not _transformed()
    return False


def unshared(*indices: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Index tensors to save for the backward: copies on the CPU. NumPy may write to memory that it shares with them,
    which torch does not count as a change, and kernels trust the indices that the forward has checked."""
    return [given if given is None or not given.is_cpu else given.clone() for given in indices]


def _has_tangent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _refusal(op: str, asked: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"{op}: {asked}: not implemented; use {instead}")
