"""Text generation with causal models and a KV cache: ``generate``, ``stream`` and ``GenerationSession``."""

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
