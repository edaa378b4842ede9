"""Text from a causal model: ``generate``, with a cache of keys and values."""

from fasttfm.generate.decoder import CachedDecoder
from fasttfm.generate.generate import GenerateOptions, generate
from fasttfm.generate.sampling import Sampling

__all__ = ["CachedDecoder", "GenerateOptions", "Sampling", "generate"]
