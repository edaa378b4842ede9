from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.dropout_add_layer_norm import SPEC

TestDropoutAddLayerNorm = op_tests(SPEC)
