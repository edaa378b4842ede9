from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.replaced_token_loss import SPEC

test_replaced_token_loss = bench_test(SPEC)
