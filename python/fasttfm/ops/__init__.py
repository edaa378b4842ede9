"""The ops. Each is a public function with argument checks, registered with torch.library, with several backends."""

from fasttfm.kernels.common.index_errors import check_errors
from fasttfm.ops.attention import attention, attention_weights
from fasttfm.ops.bias_gelu import ACTIVATIONS, bias_gelu
from fasttfm.ops.column_sum import column_sum
from fasttfm.ops.contrastive_loss import contrastive_loss
from fasttfm.ops.decode_attention import decode_attention
from fasttfm.ops.decode_linear import decode_linear
from fasttfm.ops.disentangled_attention import disentangled_attention, log_distance_rows
from fasttfm.ops.distillation_loss import distillation_loss
from fasttfm.ops.dropout_add_layer_norm import dropout_add_layer_norm
from fasttfm.ops.embedding import embedding
from fasttfm.ops.gated_activation import gated_activation
from fasttfm.ops.gelu_layer_norm import gelu_layer_norm
from fasttfm.ops.layer_norm import layer_norm
from fasttfm.ops.linear_cross_entropy import CountedLoss, linear_cross_entropy
from fasttfm.ops.linear_gelu import linear_gelu
from fasttfm.ops.masked_lm_loss import masked_lm_loss
from fasttfm.ops.maxsim import maxsim
from fasttfm.ops.mlp import mlp
from fasttfm.ops.pack import (
    cu_seqlens_from_lengths,
    cu_seqlens_from_mask,
    pack,
    position_ids_from_cu_seqlens,
    token_indices_from_mask,
    unpack,
)
from fasttfm.ops.qkv_projection import fuse_qkv, qkv_projection
from fasttfm.ops.replaced_token_loss import replaced_token_loss
from fasttfm.ops.rms_norm import rms_norm
from fasttfm.ops.rotary import rotary
from fasttfm.ops.sample_tokens import sample_tokens

__all__ = [
    "ACTIVATIONS",
    "CountedLoss",
    "attention",
    "attention_weights",
    "bias_gelu",
    "check_errors",
    "column_sum",
    "contrastive_loss",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_mask",
    "decode_attention",
    "decode_linear",
    "disentangled_attention",
    "distillation_loss",
    "dropout_add_layer_norm",
    "embedding",
    "fuse_qkv",
    "gated_activation",
    "gelu_layer_norm",
    "layer_norm",
    "linear_cross_entropy",
    "linear_gelu",
    "log_distance_rows",
    "masked_lm_loss",
    "maxsim",
    "mlp",
    "pack",
    "position_ids_from_cu_seqlens",
    "qkv_projection",
    "replaced_token_loss",
    "rms_norm",
    "rotary",
    "sample_tokens",
    "token_indices_from_mask",
    "unpack",
]
