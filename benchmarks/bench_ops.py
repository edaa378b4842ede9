"""The benchmark of each op, ``test_<op>``: the cases that its specification declares."""

from fasttfm.bench.pytest_bench import bench_test
from fasttfm.testing.specs import every_spec

globals().update({f"test_{spec.name}": bench_test(spec) for spec in every_spec()})
