"""MPNet (Song et al., 2020): RoBERTa's encoder whose attention also reads how far apart two tokens are.

    s_ij = q_i k_j / sqrt(D) + table[bucket(j - i), head]        the same table in all layers

32 buckets: 16 for keys up to the query, 16 for those after it; distances up to 7 have one each, the others one for each
logarithmic range up to 128. The bias is that of ``ops.attention``: Triton's kernels on a GPU, plain torch on a CPU.
Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.models import roberta
from fasttfm.models.bert import BertHead, EncoderConfig
from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.family import Head
from fasttfm.nn import PackedBatch, PackedLayer
from fasttfm.nn.packed_layer import draw_seeds
from fasttfm.ops import linear
from fasttfm.ops.backends import requested

_BUCKETS, _FARTHEST = 32, 128


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


def buckets(positions: Tensor) -> Tensor:
    """The bucket of every query and key, ``[..., S, S]``, of their positions ``[..., S]``."""
    distance = positions[..., None, :] - positions[..., :, None]
    half, near = _BUCKETS // 2, _BUCKETS // 4
    far = distance.abs()
    ranges = torch.log(far.float() / near) / math.log(_FARTHEST / near) * (half - near)
    logarithmic = (near + ranges.clamp(min=0).long()).clamp(max=half - 1)
    return half * (distance > 0) + torch.where(far < near, far, logarithmic)


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
            backend="reference" if x.is_cpu and requested(None) is None else None,  # a CPU has no other with a bias
        )
        assert isinstance(context, Tensor)
        return self._after_attention(context, x, cu_seqlens, (self.norm1, self.norm2), rates, seeds)

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """False: the layer is several ops."""
        return False


class MPNetModel(roberta.RobertaModel):
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

    def bias(self, batch: PackedBatch, longest: int) -> Tensor:
        """``[1, H, longest, longest]``; of a batch with padding between tokens ``[B, H, longest, longest]``."""
        columns, every = batch.columns(), torch.arange(longest, device=batch.cu_seqlens.device)
        positions = every[None] if columns is None else ops.unpack(columns, batch.cu_seqlens, longest)
        return functional.embedding(buckets(positions), self.distances.weight).permute(0, 3, 1, 2).contiguous()

    def run_layers(self, x: Tensor, batch: PackedBatch, hidden_states: list[Tensor] | None) -> Tensor:
        bias = self.bias(batch, batch.max_seqlen)
        states: Tensor = self.encoder(x, batch.cu_seqlens, batch.max_seqlen, hidden_states=hidden_states, bias=bias)
        return states

    def attentions(self, states: list[Tensor], batch: PackedBatch) -> tuple[Tensor, ...]:
        longest = batch.max_seqlen if batch.shape is None else batch.shape[1]
        options: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": longest}
        options["bias"] = self.bias(batch, longest)
        heads = [layer.project(x).unbind(-3) for layer, x in zip(self.encoder.in_order(), states, strict=True)]
        return tuple(ops.attention_weights(q, k, **options) for q, k, _ in heads)


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
