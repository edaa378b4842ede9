"""Modules with torch.nn's arguments and state_dict, served by fasttfm's ops."""

from fasttfm.nn.layer_norm import LayerNorm

__all__ = ["LayerNorm"]
