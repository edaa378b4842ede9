"""One module per op, each with its ``SPEC``."""

from __future__ import annotations

import importlib
import pkgutil

from fasttfm.testing.spec import OpSpec


def all_specs() -> dict[str, OpSpec]:
    """Every op's declaration, by op name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").SPEC for name in names}
