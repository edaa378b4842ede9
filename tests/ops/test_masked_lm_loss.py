from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.masked_lm_loss import SPEC

TestMaskedLmLoss = op_tests(SPEC)
