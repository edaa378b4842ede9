from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.gelu_layer_norm import SPEC

TestGeluLayerNorm = op_tests(SPEC)
