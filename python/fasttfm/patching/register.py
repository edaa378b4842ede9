"""``register_attention``: registers ``attn_implementation="fasttfm"`` with transformers."""

from __future__ import annotations

import importlib
from types import ModuleType

from fasttfm import _extras


def register_attention() -> None:
    """Registers fasttfm's attention with transformers, for ``from_pretrained(..., attn_implementation="fasttfm")`` and
    ``model.set_attn_implementation("fasttfm")``. ``fasttfm.patch`` calls it.

    It works for models that use transformers' attention interface, such as Llama, Qwen3 and Gemma. DeBERTa and
    MPNet do not: their attention stays transformers' own, and transformers only logs that it cannot be set."""
    load("attention")


def load(module: str) -> ModuleType:
    """A module of this package that imports transformers."""
    try:
        import transformers  # noqa: F401
    except ImportError as missing:
        raise _extras.missing("fasttfm.patch", "transformers", "hf") from missing
    return importlib.import_module(f"fasttfm.patching.{module}")
