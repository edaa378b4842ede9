"""Patches transformers' models in place to use fasttfm's ops, and registers fasttfm's attention with transformers.

Nothing here imports transformers before it is called.
"""

from fasttfm.patching.patch import patch, unpatch
from fasttfm.patching.register import register_attention
from fasttfm.patching.report import PatchReport

__all__ = ["PatchReport", "patch", "register_attention", "unpatch"]
