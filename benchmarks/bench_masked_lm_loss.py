from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.masked_lm_loss import SPEC

test_masked_lm_loss = bench_test(SPEC)
