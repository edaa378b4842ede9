"""How benchmarks reach the libraries users would pick instead."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fasttfm.testing.spec import Inputs, PeerUnavailable

Build = Callable[[Inputs, Mapping[str, Any]], Callable[[], Any]]


def peer_module(name: str) -> Any:
    """An optional package, or PeerUnavailable with the reason it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a peer may fail in any way while it is imported
        raise PeerUnavailable(f"{name}: {type(error).__name__}: {error}") from error


def liger(module: str, name: str) -> Any:
    """A name out of liger_kernel, which runs on a GPU only."""
    if not torch.cuda.is_available():
        raise PeerUnavailable("liger_kernel needs a GPU")
    return getattr(peer_module(f"liger_kernel.{module}"), name)


def compiled(build: Build) -> Build:
    """The peer under torch.compile with its strongest setting for one shape."""

    def build_compiled(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
        if not torch.cuda.is_available():
            raise PeerUnavailable("torch.compile is compared on a GPU only: on a CPU it needs a C++ compiler at run time")
        function = build(inputs, options)
        return torch.compile(function, fullgraph=True, dynamic=False)  # type: ignore[no-any-return]

    return build_compiled
