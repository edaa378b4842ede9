from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.contrastive_loss import SPEC

test_contrastive_loss = bench_test(SPEC)
