from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.skeleton import SPEC

test_skeleton = bench_test(SPEC)
