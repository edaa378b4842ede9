from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.bias_gelu import SPEC

test_bias_gelu = bench_test(SPEC)
