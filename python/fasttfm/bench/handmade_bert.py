"""BERT's masked LM training step as an expert writes it in plain torch: the strongest peer that needs no library.

It has one GEMM for q, k and v, SDPA, and the loss of only the gathered rows; the whole model is meant to be compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.p = config.num_attention_heads, config.hidden_dropout_prob
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=config.layer_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        branch = self.out(context.transpose(1, 2).reshape(batch, sequence, width))
        x = self.norm1(x + functional.dropout(branch, p))
        branch = self.down(functional.gelu(self.up(x)))
        return self.norm2(x + functional.dropout(branch, p))


class HandmadeBert(nn.Module):
    """Embeddings, layers and the masked-LM loss of the rows at ``positions`` (in [B * S]), of a ``BertConfig``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.p = config.hidden_dropout_prob
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width)
        self.segment = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.dense, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, ids: Tensor, mask: Tensor | None, labels: Tensor, positions: Tensor) -> Tensor:
        sequence = ids.shape[1]
        x = self.word(ids) + self.position.weight[:sequence] + self.segment.weight[0]
        x = functional.dropout(self.norm(x), self.p, self.training)
        allowed = None if mask is None else mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        rows = x.flatten(0, 1)[positions]
        rows = self.head_norm(functional.gelu(self.dense(rows)))
        logits = functional.linear(rows, self.word.weight, self.bias)
        return functional.cross_entropy(logits.float(), labels)
