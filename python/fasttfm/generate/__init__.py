"""Text generation with causal models and a KV cache: ``generate``, ``stream`` and ``GenerationSession``.

The package can be called: ``fasttfm.generate(model, input_ids)`` is ``fasttfm.generate.generate(model, input_ids)``.
"""

import inspect
import sys
from types import ModuleType

from fasttfm.generate.beams import BeamSearch
from fasttfm.generate.decoder import CachedDecoder
from fasttfm.generate.loop import generate, release, stream
from fasttfm.generate.sampling import Sampling
from fasttfm.generate.session import Generation, GenerationSession

__all__ = [
    "BeamSearch",
    "CachedDecoder",
    "Generation",
    "GenerationSession",
    "Sampling",
    "generate",
    "release",
    "stream",
]


class _CallableModule(ModuleType):
    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _CallableModule
__signature__ = inspect.signature(generate)  # otherwise that of a method, without its first argument
