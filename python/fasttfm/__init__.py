"""Fused transformer ops, drop-in modules, reference models, and what is done with them.

>>> import torch, fasttfm
>>> y = fasttfm.ops.layer_norm(torch.randn(2, 8, 64), torch.ones(64), torch.zeros(64))
>>> print(fasttfm.explain("layer_norm", torch.randn(2, 8, 64)))  # which backend runs this call, why not the others

Ops are registered with torch when the package is imported; the other names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fasttfm import ops
from fasttfm._version import __version__
from fasttfm.ops.core.backends import explain, use_backend

if TYPE_CHECKING:
    from fasttfm import data, flash_attn, generate, inference, models, nn, optim, tasks, testing, train
    from fasttfm.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    from fasttfm.inference import Session
    from fasttfm.patching.patch import patch, unpatch
    from fasttfm.patching.register import register_attention

__all__ = [
    "Session",
    "__version__",
    "data",
    "explain",
    "flash_attn",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "generate",
    "inference",
    "models",
    "nn",
    "ops",
    "optim",
    "patch",
    "register_attention",
    "tasks",
    "testing",
    "train",
    "unpatch",
    "use_backend",
]

# The modules of names that are not modules themselves.
_MODULES = {
    "Session": "inference",
    **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"), "flash_attn"),
    **dict.fromkeys(("patch", "register_attention", "unpatch"), "patching"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fasttfm' has no attribute {name!r}")
    module = importlib.import_module(f"fasttfm.{_MODULES.get(name, name)}")
    found = getattr(module, name) if name in _MODULES else module
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
