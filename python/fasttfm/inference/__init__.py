"""Inference: trained models as sessions that turn texts into vectors, hidden states and logits."""

from fasttfm.inference.calibration import Calibration
from fasttfm.inference.quantization import quantize_vectors, vector_ranges
from fasttfm.inference.session import Session
from fasttfm.inference.settings import EmbedSettings

__all__ = ["Calibration", "EmbedSettings", "Session", "quantize_vectors", "vector_ranges"]
