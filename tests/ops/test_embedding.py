from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.embedding import SPEC

TestEmbedding = op_tests(SPEC)
