from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.skeleton import SPEC

TestSkeleton = op_tests(SPEC)
