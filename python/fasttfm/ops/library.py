"""Registration with torch.library, in one place: schema, implementation for CPU and CUDA, and the fake that torch.compile traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Lives as long as the process: torch drops the registrations of a Library that is collected.
_library = torch.library.Library("fasttfm", "FRAGMENT")


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines ``fasttfm::<schema>`` and returns the op as ``torch.ops`` shows it.

    ``schema`` is torch's schema text, for example ``"scale(Tensor x, float factor) -> Tensor"``.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CPU")
    _library.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"fasttfm::{name}", fake, lib=_library)
    return getattr(torch.ops.fasttfm, name).default
