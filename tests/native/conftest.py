from __future__ import annotations

from collections.abc import Iterator

import pytest

from fasttfm import _C


@pytest.fixture(params=_C.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each instruction set that this CPU and this build have."""
    before = _C.active_isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)
