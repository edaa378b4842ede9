"""Building blocks of tests and benchmarks; installed with the package so that backends can be checked where they
run."""

from fasttfm.bench.peers import Peer, PeerUnavailable
from fasttfm.testing.harness import check_accuracy as check_op
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, TritonKernel
from fasttfm.testing.tolerance import compare, rounding_step

__all__ = [
    "BadCall",
    "Cost",
    "OpCase",
    "OpSpec",
    "Peer",
    "PeerUnavailable",
    "TritonKernel",
    "check_op",
    "compare",
    "rounding_step",
]
