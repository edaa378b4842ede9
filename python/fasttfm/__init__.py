"""Fused transformer ops, drop-in modules, reference models and text from them.

>>> import torch, fasttfm
>>> y = fasttfm.ops.layer_norm(torch.randn(2, 8, 64), torch.ones(64), torch.zeros(64))
>>> print(fasttfm.explain("layer_norm", torch.randn(2, 8, 64)))  # which backend runs this call, why not the others
"""

from fasttfm import generate, models, nn, ops, optim
from fasttfm._version import __version__
from fasttfm.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fasttfm.ops.backends import explain, use_backend
from fasttfm.patching import patch, register_attention, unpatch

__all__ = [
    "__version__",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "generate",
    "models",
    "nn",
    "ops",
    "optim",
    "patch",
    "register_attention",
    "unpatch",
    "use_backend",
]
