from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.decode_attention import SPEC

test_decode_attention = bench_test(SPEC)
