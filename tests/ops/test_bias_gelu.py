from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.bias_gelu import SPEC

TestBiasGelu = op_tests(SPEC)
