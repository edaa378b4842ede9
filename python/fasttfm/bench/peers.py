"""The peers of the benchmarks: libraries that users would pick instead. Those that cannot run raise PeerUnavailable."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]  # tensors by argument name; None for an omitted optional argument
Build = Callable[[Inputs, Mapping[str, Any]], Callable[[], Any]]


class PeerUnavailable(Exception):
    """Raised by a peer's ``build`` when it cannot run here; the message is shown in the benchmark's table."""


@dataclass(frozen=True)
class Peer:
    """An implementation that users would otherwise choose.

    ``build(inputs, options)`` returns a function of no arguments that runs the forward and returns its output,
    differentiable in the same inputs; it raises PeerUnavailable if it cannot run. A peer that differs from another one
    in the backward only is measured in that direction only.
    """

    name: str
    build: Build
    backward_only: bool = False


@dataclass(frozen=True)
class PeerCall:
    """The result of a peer's ``build`` if the peer has other inputs, for example the same numbers in another layout.
    The call is then differentiated in ``leaves``."""

    function: Callable[[], Any]
    leaves: list[Tensor]

    def __call__(self) -> Any:
        return self.function()


def peer_module(name: str) -> Any:
    """An optional package, or PeerUnavailable with the reason it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a peer may fail in any way while it is imported
        raise PeerUnavailable(f"{name}: {type(error).__name__}: {error}") from error


def _attribute(module: str, name: str, *, needs_gpu: bool) -> Any:
    package = module.partition(".")[0]
    if needs_gpu and not torch.cuda.is_available():
        raise PeerUnavailable(f"{package} needs a GPU")
    try:
        return getattr(peer_module(module), name)
    except AttributeError as error:
        raise PeerUnavailable(f"{package} {version_of(package)}: {error}") from error


def liger(module: str, name: str) -> Any:
    """An attribute of ``liger_kernel.<module>``, which runs only on a GPU."""
    return _attribute(f"liger_kernel.{module}", name, needs_gpu=True)


def flash_attn(name: str) -> Any:
    """An attribute of flash_attn, which runs only on a GPU."""
    return _attribute("flash_attn", name, needs_gpu=True)


def flash_attn_4(name: str) -> Any:
    """A function of FlashAttention-4 (``flash_attn.cute`` of the package flash-attn-4), which runs on a GPU only. Its
    attention functions return out and lse."""
    return _attribute("flash_attn.cute", name, needs_gpu=True)


def transformers(module: str, name: str) -> Any:
    """An attribute of ``transformers.<module>``, for example an activation."""
    return _attribute(f"transformers.{module}", name, needs_gpu=False)


def compiled(build: Build) -> Build:
    """The peer under torch.compile with its strongest setting for one shape."""

    def build_compiled(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
        if not torch.cuda.is_available():
            raise PeerUnavailable(
                "torch.compile is compared on a GPU only: on a CPU it needs a C++ compiler at run time"
            )
        function = build(inputs, options)
        return torch.compile(function, fullgraph=True, dynamic=False)

    return build_compiled


def torch_peers(build: Build) -> tuple[Peer, Peer]:
    """The op in plain torch, and the same under torch.compile."""
    return Peer("torch", build), Peer("torch.compile", compiled(build))


@functools.cache
def version_of(contender: str) -> str:
    """The version of the package that a contender's name begins with (up to a dot or blank); "" if there is none."""
    head = contender.replace(" ", ".").partition(".")[0]
    package = {"liger": "liger_kernel", "sdpa": "torch", "fa4": "flash-attn-4"}.get(head, head)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        try:
            return str(getattr(importlib.import_module(package), "__version__", ""))
        except Exception:  # not installed, or broken: its row says so
            return ""
