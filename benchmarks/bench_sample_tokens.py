from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.sample_tokens import SPEC

test_sample_tokens = bench_test(SPEC)
