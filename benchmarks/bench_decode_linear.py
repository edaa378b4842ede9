from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.decode_linear import SPEC

test_decode_linear = bench_test(SPEC)
