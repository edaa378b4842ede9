"""Modules with torch.nn's arguments and state_dict, and modules for packed tokens, built on fasttfm's ops."""

from fasttfm.nn.embeddings import Embeddings
from fasttfm.nn.fp8 import Fp8Training
from fasttfm.nn.gated import GatedActivation, GatedMLP
from fasttfm.nn.graph import GraphBatch, GraphReasoner
from fasttfm.nn.knowledge_layer import AlignedEntities, KnowledgeLayer, KnowledgeTransformer
from fasttfm.nn.layer_norm import LayerNorm, OffsetRMSNorm, RMSNorm
from fasttfm.nn.lm_heads import CausalLMHead, MaskedLMHead
from fasttfm.nn.multihead_attention import MultiheadAttention
from fasttfm.nn.packed_batch import PackedBatch
from fasttfm.nn.packed_layer import PackedLayer
from fasttfm.nn.packed_transformer import PackedTransformer
from fasttfm.nn.patch_embeddings import PatchEmbeddings
from fasttfm.nn.rotary_layer import RotaryLayer, RotaryTransformer
from fasttfm.nn.transformer_encoder import TransformerEncoder
from fasttfm.nn.transformer_encoder_layer import TransformerEncoderLayer

__all__ = [
    "AlignedEntities",
    "CausalLMHead",
    "Embeddings",
    "Fp8Training",
    "GatedActivation",
    "GatedMLP",
    "GraphBatch",
    "GraphReasoner",
    "KnowledgeLayer",
    "KnowledgeTransformer",
    "LayerNorm",
    "MaskedLMHead",
    "MultiheadAttention",
    "OffsetRMSNorm",
    "PackedBatch",
    "PackedLayer",
    "PackedTransformer",
    "PatchEmbeddings",
    "RMSNorm",
    "RotaryLayer",
    "RotaryTransformer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
