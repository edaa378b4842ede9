"""Text from a causal model: ``generate``, ``stream`` and ``GenerationSession``, with a cache of keys and values."""

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
