from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.rotary import SPEC

test_rotary = bench_test(SPEC)
