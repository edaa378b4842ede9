"""transformers' models on fasttfm's ops, in place; and attention for all of its models.

Nothing here imports transformers before it is called.
"""

from fasttfm.patching.patch import patch, unpatch
from fasttfm.patching.register import register_attention
from fasttfm.patching.report import PatchReport

__all__ = ["PatchReport", "patch", "register_attention", "unpatch"]
