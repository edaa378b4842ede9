from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.rms_norm import SPEC

test_rms_norm = bench_test(SPEC)
