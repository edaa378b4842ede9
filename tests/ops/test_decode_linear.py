from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.decode_linear import SPEC

TestDecodeLinear = op_tests(SPEC)
