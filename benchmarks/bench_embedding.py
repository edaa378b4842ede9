from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.embedding import SPEC

test_embedding = bench_test(SPEC)
