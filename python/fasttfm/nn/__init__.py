"""Modules with torch.nn's arguments and state_dict, and modules over packed tokens, served by fasttfm's ops."""

from fasttfm.nn.encoder import Encoder
from fasttfm.nn.encoder_layer import EncoderLayer
from fasttfm.nn.layer_norm import LayerNorm
from fasttfm.nn.multihead_attention import MultiheadAttention
from fasttfm.nn.transformer_encoder import TransformerEncoder
from fasttfm.nn.transformer_encoder_layer import TransformerEncoderLayer

__all__ = [
    "Encoder",
    "EncoderLayer",
    "LayerNorm",
    "MultiheadAttention",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
