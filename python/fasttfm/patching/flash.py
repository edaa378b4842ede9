"""Makes transformers find fasttfm's functions where it looks up those of FlashAttention.

transformers and sentence-transformers call ``lazy_import_flash_attention`` for the functions of an attention
implementation whose name contains "flash"; without a varlen function there, they pad the inputs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import modeling_flash_attention_utils as utils

from fasttfm.flash_attn import flash_attn_func, flash_attn_varlen_func, refuse

NAME = "fasttfm_flash"


def _refusing_sinks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument ``s_aux`` (attention sinks), for which it raises: without it, transformers would silently drop
    the sinks."""

    @functools.wraps(function)
    def call(*args: Any, s_aux: Any = None, **options: Any) -> Any:
        refuse(function.__name__, s_aux=s_aux)
        return function(*args, **options)

    signature = inspect.signature(function)
    sinks = inspect.Parameter("s_aux", inspect.Parameter.KEYWORD_ONLY, default=None)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), sinks])  # type: ignore[attr-defined]
    return call


_FUNCTIONS = (_refusing_sinks(flash_attn_func), _refusing_sinks(flash_attn_varlen_func))


def register() -> None:
    """Makes ``lazy_import_flash_attention`` find these functions under NAME."""
    imports = utils._lazy_imports
    if getattr(imports, "_fasttfm", False):
        return

    @functools.wraps(imports)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return *_FUNCTIONS, None, utils._pad_input, utils._unpad_input
        return imports(implementation, *args, **kwargs)

    lazy_imports._fasttfm = True  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports
