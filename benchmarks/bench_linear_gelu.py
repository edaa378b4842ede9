from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.linear_gelu import SPEC

test_linear_gelu = bench_test(SPEC)
