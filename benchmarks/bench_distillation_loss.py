from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.distillation_loss import SPEC

test_distillation_loss = bench_test(SPEC)
