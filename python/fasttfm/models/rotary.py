"""The network that Llama, Qwen3 and EuroBERT have in common: pre-LN with RMSNorm, rotary positions, grouped heads of
keys and values, and gated feed-forward blocks, without biases.

    x_0 = word
    x_i = y + W (silu(gate) * up),  (gate, up) = V RMS(y),  y = x_(i-1) + Attention(RMS(x_(i-1)))      i = 1 ... layers
    x = RMS(x_layers)

A family is a configuration, ``causal`` and ``head_norm``. Internally a batch is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fasttfm.models.bert import BertHead, BertModel
from fasttfm.models.checkpoint_names import Names, Rule, rule
from fasttfm.models.config import ModelConfig
from fasttfm.models.text_model import Encoded, TextModel
from fasttfm.nn import Embeddings, PackedBatch, PackedTransformer, RotaryLayer, RotaryTransformer
from fasttfm.nn.rotary_layer import rotary_norm
from fasttfm.nn.rotation import Theta, stated_rotation


class RotaryFields:
    """The fields that the encoder reads by BERT's names, of a configuration with transformers' names."""

    num_attention_heads: int
    num_key_value_heads: int | None
    attention_dropout: float
    rms_norm_eps: float

    hidden_dropout_prob = property(lambda self: 0.0)
    attention_probs_dropout_prob = property(lambda self: self.attention_dropout)
    type_vocab_size = property(lambda self: 0)
    layer_norm_eps = property(lambda self: self.rms_norm_eps)
    recompute = property(lambda self: False)
    keep_activation = property(lambda self: False)

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    def head_dropout(self) -> float:
        return 0.0


@dataclass
class RotaryConfig(RotaryFields, ModelConfig):
    """The fields of Llama and of the models with its network."""

    required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ModelConfig.required,
        "use_sliding_window": (False,),
        "pretraining_tp": (1,),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None  # num_attention_heads if None
    head_dim: int | None = None  # hidden_size / num_attention_heads if None
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    pad_token_id: int | None = None

    def rotation(self) -> Theta:
        return rotation(self, self.rope_theta)


def rotation(config: Any, default: float) -> Theta:
    """The rotation of a configuration that transformers has written: in ``rope_parameters``, or, in older ones, in
    ``rope_scaling``. ``default`` is the base of the wavelengths that neither states."""
    return _rotation(config, config.extra.get("rope_parameters"), config.extra.get("rope_scaling"), default)


def rotation_of_kind(config: Any, kind: str, default: float, *, scaled: bool = True) -> Theta:
    """The rotation in a kind of layer. ``scaled`` says whether the field of older configurations is about this kind."""
    of_kind = (config.extra.get("rope_parameters") or {}).get(kind)
    return _rotation(config, of_kind, config.extra.get("rope_scaling") if scaled else None, default, f": {kind}")


def _rotation(config: Any, stated: Any, older: Any, default: float, kind: str = "") -> Theta:
    rope = {**(older or {}), **(stated or {})}
    original = config.extra.get("original_max_position_embeddings")
    if original is not None and not kind:
        rope["original_max_position_embeddings"] = original
    name = f"rope_parameters{kind}" if stated or not older else "rope_scaling"
    return stated_rotation(name, rope, default, config.max_position_embeddings)


FULL, LOCAL = "full_attention", "sliding_attention"


def layer_kinds(written: dict[str, Any], layers: int, is_local: Callable[[int], bool]) -> list[str]:
    """``full_attention`` or ``sliding_attention`` for each layer: those that transformers has written as
    ``layer_types``, or else those that ``is_local`` says."""
    kinds = written.get("layer_types")
    if kinds is None:
        return [LOCAL if is_local(layer) else FULL for layer in range(layers)]
    if len(kinds) != layers or not {FULL, LOCAL}.issuperset(kinds):
        raise ValueError(f"layer_types: expected {FULL} or {LOCAL} for each of {layers} layers, got {kinds}")
    return list(kinds)


_BLOCK_NORMS = (
    rule("encoder.layers.*.attention_norm", "layers.*.post_attention_layernorm"),
    rule("encoder.layers.*.norm2", "layers.*.pre_feedforward_layernorm"),
    rule("encoder.layers.*.feed_forward_norm", "layers.*.post_feedforward_layernorm"),
)


def rotary_names(config: RotaryFields, heads: Sequence[Rule], *, block_norms: bool = False) -> Names:
    """The names of parameters in checkpoints, with ``heads`` for the models around the network."""
    layer, attention = "layers.*", "layers.*.self_attn"
    q, kv = config.num_attention_heads, config.kv_heads
    projections = [f"{attention}.{part}_proj" for part in ("q", "k", "v")]
    return Names(
        prefix="model",
        base=(
            rule("embeddings.word", "embed_tokens"),
            rule("encoder.layers.*.norm1", f"{layer}.input_layernorm"),
            rule("encoder.layers.*.qkv", *projections, shares=(q, kv, kv)),
            rule("encoder.layers.*.q_norm", f"{attention}.q_norm"),
            rule("encoder.layers.*.k_norm", f"{attention}.k_norm"),
            rule("encoder.layers.*.out", f"{attention}.o_proj"),
            *(_BLOCK_NORMS if block_norms else (rule("encoder.layers.*.norm2", f"{layer}.post_attention_layernorm"),)),
            rule("encoder.layers.*.up", f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
            rule("encoder.layers.*.down", f"{layer}.mlp.down_proj"),
            rule("encoder.final_norm", "norm"),
        ),
        heads=heads,
        ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    )


class RotaryPositions(TextModel):
    """A text model whose embeddings have no positions; its layers rotate queries and keys by them."""

    layer_inputs = ("rotary_positions",)

    def encode_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **layout: Any,
    ) -> Encoded:
        if position_ids is not None and self.outputs(None, layout.get("output_attentions"))[1]:
            expected = "None with output_attentions (weights are computed for each token's own index)"
            raise ValueError(f"{type(self).__name__}: position_ids: expected {expected}, got a tensor")
        positions = None if position_ids is None else position_ids.expand_as(input_ids)
        return super().encode_packed(input_ids, attention_mask, token_type_ids, rotary_positions=positions, **layout)

    def positions(self, input_ids: Tensor, ids: Tensor, position_ids: Any, batch: PackedBatch) -> Tensor | None:
        return None  # the embeddings have none

    def run_layers(
        self,
        x: Tensor,
        batch: PackedBatch,
        hidden_states: list[Tensor] | None,
        rotary_positions: Tensor | None = None,
    ) -> Tensor:
        positions = batch.columns() if rotary_positions is None else batch.pack(rotary_positions)
        sizes = (batch.cu_seqlens, batch.max_seqlen)
        states: Tensor = self.encoder(x, *sizes, hidden_states=hidden_states, positions=positions)
        return states


class RotaryModel(RotaryPositions, BertModel):
    """The network, called as ``BertModel`` is, without segments. It has no pooler."""

    config_class: ClassVar[type[ModelConfig]] = RotaryConfig
    head_rules: ClassVar[Sequence[Rule]] = ()
    causal: ClassVar[bool] = False  # whether tokens attend only to themselves and earlier ones
    head_norm: ClassVar[bool] = False  # whether each head of queries and keys has an RMSNorm

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.names = self.names_of(config)

    @classmethod
    def names_of(cls, config: Any) -> Names:
        return rotary_names(config, cls.head_rules)

    def embeddings_of(self, config: Any) -> Embeddings:
        return Embeddings(
            config.vocab_size, config.hidden_size, norm=False, dropout=0.0, padding_idx=config.pad_token_id
        )

    def stack_of(self, config: Any) -> PackedTransformer:
        layers = [
            RotaryLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.intermediate_size,
                theta=config.rotation(),
                window=(None, 0) if self.causal else None,
                activation=config.hidden_act,
                attention_dropout=config.attention_dropout,
                eps=config.rms_norm_eps,
                attention_bias=config.attention_bias,
                feed_forward_bias=config.mlp_bias,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                norm="rms",
                head_norm=self.head_norm,
            )
            for _ in range(config.num_hidden_layers)
        ]
        final_norm: Any = rotary_norm("rms", config.hidden_size, config.rms_norm_eps, bias=False)
        return RotaryTransformer(layers, final_norm, config.max_position_embeddings)


class RotaryHead(BertHead):
    """A model around the network."""

    encoder_class: ClassVar[type[RotaryModel]] = RotaryModel

    def names_of(self, config: Any) -> Names:
        return self.encoder_class.names_of(config)


def sequence_means(x: Tensor, batch: PackedBatch) -> Tensor:
    """[sequences, C]: the mean over each sequence of packed ``x`` [T, C]."""
    totals = batch.per_sequence(x, fill=0.0).sum(1)
    return totals / batch.cu_seqlens.diff()[:, None]
