from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.layer_norm import SPEC

TestLayerNorm = op_tests(SPEC)
