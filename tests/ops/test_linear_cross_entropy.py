from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.linear_cross_entropy import SPEC

TestLinearCrossEntropy = op_tests(SPEC)
