from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.mlp import SPEC

test_mlp = bench_test(SPEC)
