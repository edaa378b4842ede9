"""fasttfm's ops as a kernel of the Hugging Face hub: torch ops with gradients over Triton kernels."""

from . import flash_attn, layers, ops
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .ops import (
    attention,
    bias_gelu,
    distillation_loss,
    dropout_add_layer_norm,
    gated_activation,
    gelu_layer_norm,
    layer_norm,
    linear_cross_entropy,
    masked_lm_loss,
    replaced_token_loss,
    rms_norm,
)

__all__ = [
    "attention",
    "bias_gelu",
    "distillation_loss",
    "dropout_add_layer_norm",
    "flash_attn",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "gated_activation",
    "gelu_layer_norm",
    "layer_norm",
    "layers",
    "linear_cross_entropy",
    "masked_lm_loss",
    "ops",
    "replaced_token_loss",
    "rms_norm",
]
