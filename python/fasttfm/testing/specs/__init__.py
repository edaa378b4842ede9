"""One module per op, each with its ``SPEC``."""

from __future__ import annotations

import importlib
import pkgutil

from fasttfm.testing.spec import OpSpec


def all_specs() -> dict[str, OpSpec]:
    """Every op's declaration, by op name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").SPEC for name in names}


def every_spec() -> list[OpSpec]:
    """Every declaration: a module's ``SPEC``, and those of ops that share their kernels with it."""
    modules = (importlib.import_module(f"{__name__}.{name}") for name in all_specs())
    return [value for module in modules for value in vars(module).values() if isinstance(value, OpSpec)]
