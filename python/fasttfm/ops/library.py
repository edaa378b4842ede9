"""Registration with torch.library, in one place: schema, implementation for CPU and CUDA, fake for torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Lives as long as the process: torch drops the registrations of a Library that is collected.
_library = torch.library.Library("fasttfm", "FRAGMENT")
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_compiler_traces = torch.compiler.is_dynamo_compiling  # other tracers are dispatch modes
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transform = torch._C._functorch.peek_interpreter_stack


class RegisteredOp:
    """An op as autograd functions call it.

    ``torch.ops`` is where torch.compile, fake tensors, dispatch modes and tensor subclasses look. A plain eager call
    gains nothing there but pays for the dispatcher's way into Python and back, which costs more than a small kernel: it
    goes straight on.
    """

    def __init__(self, overload: Any, implementation: Callable[..., Any]) -> None:
        self.overload = overload
        self.implementation = implementation

    def __call__(self, first: torch.Tensor, *args: Any) -> Any:
        return (self.implementation if is_plain(first) else self.overload)(first, *args)


def straight(first: torch.Tensor, *ops: RegisteredOp) -> list[Callable[..., Any]]:
    """The ops for calls on tensors like ``first``: it is looked up once for all of them whether they go straight on."""
    plain = is_plain(first)
    return [op.implementation if plain else op.overload for op in ops]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether calls on the tensor are plain eager ones: nobody traces them, and no dispatch mode, function transform or
    subclass wants to see ops."""
    return (
        not _compiler_traces()
        and _dispatch_modes() == 0
        and _function_transform() is None
        and type(tensor) in PLAIN_TENSORS
    )


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> RegisteredOp:
    """Defines ``fasttfm::<schema>`` for CPU and CUDA tensors.

    ``schema`` is torch's schema text, for example ``"scale(Tensor x, float factor) -> Tensor"``; a tensor comes first.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CPU")
    _library.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"fasttfm::{name}", fake, lib=_library)
    return RegisteredOp(getattr(torch.ops.fasttfm, name).default, implementation)


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd has to see the call; one that it need not see skips the autograd function and its cost."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
