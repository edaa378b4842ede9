from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.gated_activation import SPEC

test_gated_activation = bench_test(SPEC)
