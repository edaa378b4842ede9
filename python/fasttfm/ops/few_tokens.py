"""What layers over few tokens on Hopper keep between calls: the workspace of the kernel for all layers
(``few_rows_layers``), and the folded weights (``folded_layers``). Other kernels need neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from fasttfm.ops.few_rows_layers import Workspace
from fasttfm.ops.folded_layers import FoldedWeights


class FewTokens:
    """Of calls that follow one another on one stream."""

    def __init__(self) -> None:
        self.workspace, self.folded = Workspace(), FoldedWeights()


_current: ContextVar[FewTokens | None] = ContextVar("few_tokens", default=None)


@contextlib.contextmanager
def using(kept: FewTokens) -> Iterator[None]:
    """Inside of it, layers may run in the kernel for all of them, and with folded LayerNorms."""
    token = _current.set(kept)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> FewTokens | None:
    return _current.get()
