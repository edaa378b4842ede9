from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.column_sum import SPEC

test_column_sum = bench_test(SPEC)
