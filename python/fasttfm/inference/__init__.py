"""Inference: trained models as sessions that turn texts into vectors, hidden states and logits."""

from fasttfm.inference.calibration import Calibration
from fasttfm.inference.quantization import quantize_vectors as quantize_vectors
from fasttfm.inference.quantization import vector_ranges as vector_ranges
from fasttfm.inference.session import Session
from fasttfm.inference.settings import EmbedSettings
from fasttfm.inference.spans import AnswerSpans
from fasttfm.inference.sparse import SparseVectors as SparseVectors

__all__ = ["AnswerSpans", "Calibration", "EmbedSettings", "Session"]
