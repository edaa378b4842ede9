"""MPNet (Song et al., 2020): RoBERTa's encoder whose attention also reads how far apart two tokens are.

    s_ij = q_i k_j / sqrt(D) + table[bucket(j - i), head]        32 buckets (relative_bias.py)

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from fasttfm import ops
from fasttfm.models import roberta
from fasttfm.models.bert import BertHead, EncoderConfig
from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.family import Head
from fasttfm.models.relative_bias import RelativeBias
from fasttfm.nn import PackedLayer
from fasttfm.nn.packed_layer import biased_backend, draw_seeds
from fasttfm.ops import linear

_BUCKETS = 32


@dataclass
class MPNetConfig(roberta.RobertaConfig):
    model_type: ClassVar[str] = "mpnet"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {"tiny": roberta.RobertaConfig.sizes["tiny"], "base": {}}
    required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **roberta.RobertaConfig.required,
        "relative_attention_num_buckets": (_BUCKETS,),
    }

    vocab_size: int = 30527
    type_vocab_size: int = 0


_LAYER = "encoder.layer.*"
NAMES = Names(
    prefix="mpnet",
    base=(
        rule("embeddings.word", "embeddings.word_embeddings"),
        rule("embeddings.position", "embeddings.position_embeddings"),
        rule("embeddings.norm", "embeddings.LayerNorm"),
        rule("distances", "encoder.relative_attention_bias"),
        rule("encoder.layers.*.qkv", *(f"{_LAYER}.attention.attn.{part}" for part in "qkv")),
        rule("encoder.layers.*.out", f"{_LAYER}.attention.attn.o"),
        rule("encoder.layers.*.norm1", f"{_LAYER}.attention.LayerNorm"),
        rule("encoder.layers.*.up", f"{_LAYER}.intermediate.dense"),
        rule("encoder.layers.*.down", f"{_LAYER}.output.dense"),
        rule("encoder.layers.*.norm2", f"{_LAYER}.output.LayerNorm"),
        rule("pooler", "pooler.dense"),
    ),
    heads=roberta.NAMES.heads,
    ignored=(r"mpnet\.embeddings\.position_ids",),
)
UNTIED_NAMES = replace(NAMES, heads=roberta.UNTIED_NAMES.heads, ignored=(*NAMES.ignored, r"lm_head\.bias"))


# ---- the encoder -----------------------------------------------------------------------------------------------------


class BiasedLayer(PackedLayer):
    """A post-LN ``PackedLayer`` whose attention scores have a bias ``[1 or B, H, S, S]``."""

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        residual: Tensor | None = None,
        next_norm: nn.LayerNorm | None = None,
        seeds: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        (x,) = linear.autocast(x)
        self.check(x, cu_seqlens, residual, next_norm)
        rates = self.rates()
        seeds = None if not any(rates) else draw_seeds(x.device) if seeds is None else seeds
        context = ops.attention(
            self.project(x),
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            bias=bias,
            dropout_p=rates[0],
            seed=None if seeds is None else seeds[:1],
            backend=biased_backend(x, bias),
        )
        assert isinstance(context, Tensor)
        return self._after_attention(context, x, cu_seqlens, (self.norm1, self.norm2), rates, seeds)

    def attention_weights(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, bias: Tensor | None = None) -> Tensor:
        """``PackedLayer``'s weights, with ``forward``'s ``bias``."""
        q, k, _ = self.project(x).unbind(-3)
        return ops.attention_weights(q, k, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, bias=bias)

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """False: the layer is several ops."""
        return False


class MPNetModel(RelativeBias, roberta.RobertaModel):
    """The encoder, with a pooler on the first token; called as ``RobertaModel`` is, without segments."""

    config_class, names = MPNetConfig, NAMES

    def __init__(self, config: EncoderConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        self.distances = nn.Embedding(_BUCKETS, config.num_attention_heads)
        self.finish()

    def layer_of(self, config: EncoderConfig) -> PackedLayer:
        return BiasedLayer(
            config.hidden_size,
            config.num_attention_heads,
            config.intermediate_size,
            activation=config.hidden_act,
            dropout=config.hidden_dropout_prob,
            attention_dropout=config.attention_probs_dropout_prob,
            eps=config.layer_norm_eps,
        )


# ---- heads -----------------------------------------------------------------------------------------------------------


class MPNetHead(BertHead):
    """A model around the encoder."""

    config_class, names, untied_names, encoder_class = MPNetConfig, NAMES, UNTIED_NAMES, MPNetModel


class MPNetForMaskedLM(MPNetHead, roberta.RobertaForMaskedLM):
    """Predicts masked tokens."""


class MPNetForSequenceClassification(MPNetHead, roberta.RobertaForSequenceClassification):
    """Labels sequences by a two-layer head on the first token."""


class MPNetForTokenClassification(MPNetHead, roberta.RobertaForTokenClassification):
    """Labels tokens."""


class MPNetForQuestionAnswering(MPNetHead, roberta.RobertaForQuestionAnswering):
    """Finds the span that answers a question."""


class MPNetForMultipleChoice(MPNetHead, roberta.RobertaForMultipleChoice):
    """Chooses between continuations."""


FAMILY = replace(
    roberta.FAMILY,
    title="MPNet",
    config=MPNetConfig,
    models={
        Head.NONE: MPNetModel,
        Head.MASKED_LM: MPNetForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: MPNetForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: MPNetForTokenClassification,
        Head.QUESTION_ANSWERING: MPNetForQuestionAnswering,
        Head.MULTIPLE_CHOICE: MPNetForMultipleChoice,
    },
    pretraining=None,  # its paper's is over permuted tokens
    tokenizer="wordpiece",
    patching="mpnet",
)
