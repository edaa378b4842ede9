from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.layer_norm import SPEC

test_layer_norm = bench_test(SPEC)
