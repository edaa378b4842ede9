from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.gelu_layer_norm import SPEC

test_gelu_layer_norm = bench_test(SPEC)
