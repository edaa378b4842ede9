from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.linear_cross_entropy import SPEC

test_linear_cross_entropy = bench_test(SPEC)
