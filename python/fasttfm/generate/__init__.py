"""Text from a causal model: ``generate``, with a cache of keys and values."""

from fasttfm.generate.decoder import CachedDecoder
from fasttfm.generate.loop import generate
from fasttfm.generate.sampling import Sampling

__all__ = ["CachedDecoder", "Sampling", "generate"]
