from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs.pack import SPEC, UNPACK_SPEC

test_pack = bench_test(SPEC)
test_unpack = bench_test(UNPACK_SPEC)
