from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.dropout_add_layer_norm import SPEC

test_dropout_add_layer_norm = bench_test(SPEC)
