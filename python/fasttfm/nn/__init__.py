"""Modules with torch.nn's arguments and state_dict, served by fasttfm's ops."""

from fasttfm.nn.layer_norm import LayerNorm
from fasttfm.nn.multihead_attention import MultiheadAttention
from fasttfm.nn.transformer_encoder import TransformerEncoder
from fasttfm.nn.transformer_encoder_layer import TransformerEncoderLayer

__all__ = ["LayerNorm", "MultiheadAttention", "TransformerEncoder", "TransformerEncoderLayer"]
