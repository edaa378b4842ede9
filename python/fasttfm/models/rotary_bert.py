"""The network that NomicBERT, GTE and Jina's embedding model have in common: BERT with rotary positions.

    x_0 = LN(word + segment)
    x_i = LN(y + MLP(y)),  y = LN(x_(i-1) + Attention(x_(i-1)))        i = 1 ... layers

A family is a configuration and the options of its layers. Internally a batch is packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from fasttfm.models.bert import BertModel
from fasttfm.models.checkpoint_names import Names, Rule, rule
from fasttfm.models.rotary import RotaryPositions
from fasttfm.nn import Embeddings, PackedTransformer, RotaryLayer, RotaryTransformer


def module_names(prefix: str, heads: Sequence[Rule], *, gated: bool) -> Names:
    """The names of transformers' modules, which adapters have."""
    layer, attention = "layers.*", "layers.*.self_attn"
    up = (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj") if gated else (f"{layer}.mlp.fc1",)
    return Names(
        prefix=prefix,
        base=(
            rule("embeddings.word", "embeddings.word_embeddings"),
            rule("embeddings.segment", "embeddings.token_type_embeddings"),
            rule("encoder.layers.*.qkv", *(f"{attention}.{part}_proj" for part in "qkv")),
            rule("encoder.layers.*.out", f"{attention}.o_proj"),
            rule("encoder.layers.*.up", *up),
            rule("encoder.layers.*.down", f"{layer}.mlp.{'down_proj' if gated else 'fc2'}"),
            rule("pooler", "pooler.dense"),
        ),
        heads=heads,
    )


class RotaryBertModel(RotaryPositions, BertModel):
    """The encoder, called as ``BertModel`` is."""

    layer_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # of ``RotaryLayer``
    drops_inside: ClassVar[bool] = False  # whether there is dropout inside of the feed-forward block

    def embeddings_of(self, config: Any) -> Embeddings:
        return Embeddings(
            config.vocab_size,
            config.hidden_size,
            0,
            config.type_vocab_size,
            eps=config.layer_norm_eps,
            dropout=config.hidden_dropout_prob,
            padding_idx=config.pad_token_id,
        )

    def stack_of(self, config: Any) -> PackedTransformer:
        layers = [
            RotaryLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.intermediate_size,
                theta=config.rotation(),
                norm_first=False,
                activation=config.hidden_act,
                dropout=config.hidden_dropout_prob,
                attention_dropout=config.attention_probs_dropout_prob,
                feed_forward_dropout=config.hidden_dropout_prob,
                intermediate_dropout=config.hidden_dropout_prob if self.drops_inside else 0.0,
                eps=config.layer_norm_eps,
                norm_bias=True,
                head_dim=getattr(config, "head_dim", None),
                **self.layer_options,
            )
            for _ in range(config.num_hidden_layers)
        ]
        return RotaryTransformer(layers, None, config.max_position_embeddings)
