"""A harness of seams: what happens around a call (threads, streams, captures, changed weights, wrong boundaries,
failed allocations, forks, settings of torch) must not change what it computes, for every public entry point.

``plan("cpu")`` pairs every seam with every entry point; ``tests/seams`` runs it. An entry point is a description
(entry.py) that comes from a registry where there is one: specs of ops, families of models, optimizers. mutants.py has
entry points that are broken on purpose, which the seams reject.
"""

from fasttfm.testing.seams.entry import EntryPoint, SeamError
from fasttfm.testing.seams.registry import Seam, entry_points, plan, run, seams

__all__ = ["EntryPoint", "Seam", "SeamError", "entry_points", "plan", "run", "seams"]
