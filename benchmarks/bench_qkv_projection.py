from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.qkv_projection import SPEC

test_qkv_projection = bench_test(SPEC)
