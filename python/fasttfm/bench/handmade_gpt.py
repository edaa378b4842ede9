"""GPT-2's training step as an expert writes it in plain torch: one GEMM for q, k and v, causal SDPA, pre-LN."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.n_embd
        self.heads, self.p = config.n_head, config.resid_pdrop
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=config.layer_norm_epsilon) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + functional.dropout(self.out(context.transpose(1, 2).reshape(batch, sequence, width)), p)
        branch = self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + functional.dropout(branch, p)


class HandmadeGPT(nn.Module):
    """Embeddings, layers and the loss of each next token, of a ``GPT2Config``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.n_embd
        self.p = config.embd_pdrop
        self.word, self.position = nn.Embedding(config.vocab_size, width), nn.Embedding(config.n_positions, width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """``labels`` are the ids, -100 after the end of a sequence."""
        x = self.word(ids) + self.position.weight[: ids.shape[1]]
        x = functional.dropout(x, self.p, self.training)
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x)[:, :-1], self.word.weight).flatten(0, 1)
        return functional.cross_entropy(logits.float(), labels[:, 1:].flatten())
