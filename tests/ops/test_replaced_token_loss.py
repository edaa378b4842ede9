from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.replaced_token_loss import SPEC

TestReplacedTokenLoss = op_tests(SPEC)
