"""Text from a causal model: ``generate`` and ``stream``, with a cache of keys and values."""

from fasttfm.generate.decoder import CachedDecoder
from fasttfm.generate.loop import generate, stream
from fasttfm.generate.sampling import Sampling

__all__ = ["CachedDecoder", "Sampling", "generate", "stream"]
