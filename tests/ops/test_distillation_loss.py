from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.distillation_loss import SPEC

TestDistillationLoss = op_tests(SPEC)
