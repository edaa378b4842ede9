from __future__ import annotations

from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.attention import SPEC

TestAttention = op_tests(SPEC)
