"""Registration with torch.library, and the ops' interface to torch's dispatcher and autograd."""

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

_PLAIN_ARGUMENTS = frozenset((*PLAIN_TENSORS, type(None), torch.dtype))  # in the index of tensors and between them

is_compiling = torch.compiler.is_dynamo_compiling  # other tracers are dispatch modes
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functions_transform = torch._C._are_functorch_transforms_active
_jit_traces = torch._C._is_tracing
any_requires_grad = torch._C._any_requires_grad
_is_batched = torch._C._functorch.is_legacy_batchedtensor


# ---- registered ops --------------------------------------------------------------------------------------------------


class RegisteredOp:
    """A registered op, for autograd functions.

    torch.compile, fake tensors, dispatch modes, tensor subclasses and torch.jit.trace need calls of ``torch.ops``. A
    plain eager call calls the implementation directly, because the dispatcher's way through Python costs more than a
    small kernel.
    """

    def __init__(self, overload: Any, implementation: Callable[..., Any]) -> None:
        self.overload = overload
        self.implementation = implementation
        arguments = enumerate(overload._schema.arguments, start=1)
        self.tensors = max(index for index, argument in arguments if "Tensor" in str(argument.type))  # come first

    def __call__(self, *args: Any) -> Any:
        if is_plain(args[: self.tensors]):
            return self.implementation(*args)
        if not is_compiling() and _jit_traces() and list in map(type, args):  # torch records no list of bool
            raise _refusal(self.overload.name(), "torch.jit.trace", "torch.compile or torch.export")
        return self.overload(*args)

    def without_derivatives(self, keys: Any, *args: Any) -> Any:
        """The dispatcher's autograd kernel. Gradients come from an ``OpFunction``, which calls the op with autograd
        disabled; if a derivative is still required here, it would be lost, so this raises."""
        differentiated = torch.is_grad_enabled() and any_requires_grad(*args)
        if differentiated or (forward_ad._current_level >= 0 and any(map(_has_tangent, args))):
            asked = "derivatives in forward mode, by torch.func or in torch.jit.trace"
            raise _refusal(self.overload.name(), asked, "first derivatives by torch.autograd, or plain torch functions")
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(keys & torch._C._after_autograd_keyset, *args)


def bypass_dispatcher(args: Sequence[Any], *ops: RegisteredOp) -> list[Callable[..., Any]]:
    """The ops for calls with the tensors ``args`` and with results of such calls. Whether they bypass the dispatcher is
    decided once for all of them."""
    plain = is_plain(args)
    return [op.implementation if plain else op.overload for op in ops]


def is_plain(args: Sequence[Any]) -> bool:
    """Whether a call with these tensors and Nones, a tensor first, is a plain eager call: it is not traced or
    transformed, and there is no dispatch mode or tensor subclass. All tensors of a call are on one device, so the first
    one shows whether they are meta tensors."""
    if is_compiling() or _dispatch_modes() or forward_ad._current_level >= 0 or _functions_transform() or _jit_traces():
        return False
    return are_plain_tensors(args) and not args[0].is_meta


def are_plain_tensors(args: Sequence[Any]) -> bool:
    """Whether all are plain tensors or None, whatever a call with them is."""
    if not _PLAIN_ARGUMENTS.issuperset(map(type, args)):
        return False
    for value in args:  # noqa: SIM110  # a generator takes twice as long
        # torch's negative bit (``z.conj().imag``), which kernels would ignore and torch's dispatcher resolves. Only
        # views of complex tensors have it.
        if type(value) is Tensor and value.is_neg():
            return False
    return True


def _transformed() -> bool:
    """Whether torch.func, forward mode or torch.jit.trace is active. None of them can use an ``OpFunction``."""
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
    """An op's autograd function: first derivatives in reverse mode, for one incoming gradient at a time.

    Autograd cannot differentiate the gradients of kernels, so second derivatives (``create_graph``) raise, and so do
    batched gradients.
    """

    op: ClassVar[str]
    # An alternative with second derivatives; None if the op's own are right because it is linear.
    instead: ClassVar[str | None]
    # It does what apply() does, without function transforms, on which apply() spends half of its time.
    apply_plain: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.apply_plain = super(torch.autograd.Function, cls).apply  # type: ignore[misc]
        cls.backward = staticmethod(_once(cls, cls.backward))  # type: ignore[method-assign]


def _once(function: type[OpFunction], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a backward, which then raises for second derivatives and batched gradients."""

    def once(ctx: Any, *gradients: Any) -> Any:
        if not is_compiling():  # compiled functions raise for second derivatives themselves
            if function.instead is not None and torch.is_grad_enabled():
                raise _refusal(function.op, "second derivatives (create_graph=True)", function.instead)
            for gradient in gradients:
                if gradient is not None and _is_batched(gradient):
                    raise _refusal(function.op, "batched gradients (is_grads_batched=True)", "one call for each")
        return backward(ctx, *gradients)

    return once


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether a call needs its autograd function; other calls skip its cost. If the autograd function cannot be used,
    registered ops raise for derivatives."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return is_compiling() or not _transformed()
    return False


def unshared(*indices: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Index tensors to save for the backward, copied on the CPU: NumPy may write to memory that it shares with them,
    which torch's version counters do not see, and the backward's kernels trust indices that the forward has checked."""
    return [tensor if tensor is None or not tensor.is_cpu else tensor.clone() for tensor in indices]


def _has_tangent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _refusal(op: str, asked: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"{op}: {asked}: not implemented; use {instead}")
