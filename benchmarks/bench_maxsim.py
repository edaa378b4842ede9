from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.maxsim import SPEC

test_maxsim = bench_test(SPEC)
