from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.attention import SPEC

test_attention = bench_test(SPEC)
