"""The encoder of T5 (Raffel et al., 2019), also of Flan-T5 and of sentence-t5: pre-LN with RMSNorm, and a bias of
relative positions instead of position embeddings.

    x_0 = word
    y   = x_(i-1) + Attention(RMS(x_(i-1)))
    x_i = y + W relu(V RMS(y))        i = 1 ... layers;  gated: W (gelu(gate) * up),  (gate, up) = V RMS(y)
    x   = RMS(x_layers)

    s_ij = q_i k_j + table[bucket(j - i), head]        scores are not divided; the same table in all layers

Classes, arguments, outputs and checkpoints are those of transformers; of a checkpoint of encoder and decoder, the
encoder is read. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm.models.bert import BertForTokenClassification, BertModel
from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.config import ModelConfig
from fasttfm.models.family import Family, Head
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.relative_bias import RelativeBias
from fasttfm.nn import Embeddings, PackedBatch, PackedTransformer, RotaryLayer, RotaryTransformer
from fasttfm.nn.rotary_layer import rotary_norm

_Base: Any = PretrainedModel if TYPE_CHECKING else object


@dataclass
class T5Config(ModelConfig):
    """Fields have transformers' names; the encoder reads them by BERT's names."""

    model_type: ClassVar[str] = "t5"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"num_layers": 2, "d_model": 128, "num_heads": 2, "d_ff": 512},
        "small": {},
        "base": {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072},
        "large": {"num_layers": 24, "d_model": 1024, "num_heads": 16, "d_ff": 4096},
    }
    required: ClassVar[dict[str, tuple[Any, ...]]] = {**ModelConfig.required, "is_decoder": (False,)}

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    n_positions: int = 512  # of pre-training; the encoder itself has no limit
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"  # an activation; gated-ACTIVATION for a block with a gate
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    classifier_dropout: float = 0.0

    hidden_size = property(lambda self: self.d_model)
    num_hidden_layers = property(lambda self: self.num_layers)
    num_attention_heads = property(lambda self: self.num_heads)
    intermediate_size = property(lambda self: self.d_ff)
    hidden_dropout_prob = property(lambda self: self.dropout_rate)
    attention_probs_dropout_prob = property(lambda self: self.dropout_rate)
    max_position_embeddings = property(lambda self: self.n_positions)
    type_vocab_size = property(lambda self: 0)
    layer_norm_eps = property(lambda self: self.layer_norm_epsilon)
    initializer_range = property(lambda self: self.initializer_factor * self.d_model**-0.5)
    recompute = property(lambda self: False)
    keep_activation = property(lambda self: False)

    @property
    def gated(self) -> bool:
        return self.feed_forward_proj.startswith("gated-")

    @property
    def hidden_act(self) -> str:
        """The activation; T5's gated gelu is the one by tanh."""
        name = self.feed_forward_proj.removeprefix("gated-")
        return "gelu_new" if self.gated and name == "gelu" else name

    def head_dropout(self) -> float:
        return self.classifier_dropout


def names_of(config: Any) -> Names:
    block = "encoder.block.*.layer"
    up = (f"{block}.1.DenseReluDense.wi_0", f"{block}.1.DenseReluDense.wi_1")
    return Names(
        prefix="transformer",
        base=(
            rule("embeddings.word", "shared"),
            rule("distances", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
            rule("encoder.layers.*.norm1", f"{block}.0.layer_norm"),
            rule("encoder.layers.*.qkv", *(f"{block}.0.SelfAttention.{part}" for part in "qkv")),
            rule("encoder.layers.*.out", f"{block}.0.SelfAttention.o"),
            rule("encoder.layers.*.norm2", f"{block}.1.layer_norm"),
            rule("encoder.layers.*.up", *(up if config.gated else [f"{block}.1.DenseReluDense.wi"])),
            rule("encoder.layers.*.down", f"{block}.1.DenseReluDense.wo"),
            rule("encoder.final_norm", "encoder.final_layer_norm"),
        ),
        heads=(rule("classifier", "classifier"),),
        ignored=(r"transformer\.encoder\.embed_tokens\..*", r"(transformer\.)?(decoder|lm_head)\..*"),
    )


class T5Parameters(_Base):
    """The initial values of parameters, by their numbers of inputs."""

    def initialise(self, module: nn.Module) -> None:
        factor, width = self.config.initializer_factor, self.config.d_model
        if isinstance(module, RotaryLayer):
            attended = module.heads * module.head_dim
            with torch.no_grad():
                module.qkv.weight[:attended].normal_(std=factor * (width * module.head_dim) ** -0.5)
            nn.init.normal_(module.out.weight, std=factor * attended**-0.5)
            nn.init.normal_(module.down.weight, std=factor * module.down.in_features**-0.5)
        elif isinstance(module, Embeddings):
            nn.init.normal_(module.word.weight, std=factor)
        elif not isinstance(module, PackedTransformer):
            super().initialise(module)


class T5EncoderModel(T5Parameters, RelativeBias, BertModel):
    """The encoder, called as ``BertModel`` is, without segments and positions. It has no pooler."""

    config_class: ClassVar[type[ModelConfig]] = T5Config

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.names, self.farthest = names_of(config), config.relative_attention_max_distance
        self.distances = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.finish()

    def embeddings_of(self, config: Any) -> Embeddings:
        return Embeddings(config.vocab_size, config.d_model, norm=False, dropout=config.dropout_rate)

    def stack_of(self, config: Any) -> PackedTransformer:
        layers = [
            RotaryLayer(
                config.d_model,
                config.num_heads,
                config.d_ff,
                theta=None,
                activation=config.hidden_act,
                dropout=config.dropout_rate,
                feed_forward_dropout=config.dropout_rate,
                intermediate_dropout=config.dropout_rate,
                eps=config.layer_norm_epsilon,
                head_dim=config.d_kv,
                norm="rms",
                scale=1.0,
                gated=config.gated,
            )
            for _ in range(config.num_layers)
        ]
        final_norm: Any = rotary_norm("rms", config.d_model, config.layer_norm_epsilon, bias=False)
        return RotaryTransformer(layers, final_norm, 1)

    def positions(self, input_ids: Tensor, ids: Tensor, position_ids: Tensor | None, batch: PackedBatch) -> None:
        if position_ids is not None:
            expected = "None (attention reads how far apart tokens are)"
            raise ValueError(f"{type(self).__name__}: position_ids: expected {expected}, got a tensor")

    def run_layers(self, x: Tensor, batch: PackedBatch, hidden_states: list[Tensor] | None) -> Tensor:
        states = super().run_layers(x, batch, hidden_states)
        return functional.dropout(states, self.config.dropout_rate, self.training)


class T5ForTokenClassification(T5Parameters, BertForTokenClassification):
    """Labels tokens; those with label -100 do not count."""

    config_class: ClassVar[type[ModelConfig]] = T5Config
    encoder_class: ClassVar[type[BertModel]] = T5EncoderModel

    def names_of(self, config: Any) -> Names:
        return names_of(config)


FAMILY = Family(
    "T5",
    T5Config,
    {Head.NONE: T5EncoderModel, Head.TOKEN_CLASSIFICATION: T5ForTokenClassification},
    tokenizer="unigram",
    template=True,
    positions="n_positions",
)
