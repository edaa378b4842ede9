"""XLNet's configuration, and the names of its parameters in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fasttfm.models.checkpoint_names import Names, Rule, rule
from fasttfm.models.config import ModelConfig
from fasttfm.nn.disentangled_layer import FUNCTIONS

_SUMMARIES = ("last", "first")


@dataclass
class XLNetConfig(ModelConfig):
    """Fields have transformers' names; the encoder reads them by BERT's names."""

    model_type: ClassVar[str] = "xlnet"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"n_layer": 2, "d_model": 128, "n_head": 2, "d_inner": 512},
        "base": {"n_layer": 12, "d_model": 768, "n_head": 12, "d_inner": 3072},
        "large": {},
    }
    required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ModelConfig.required,
        "attn_type": ("bi",),
        "bi_data": (False,),
        "summary_proj_to_labels": (False, None),
    }

    vocab_size: int = 32000
    d_model: int = 1024
    n_layer: int = 24
    n_head: int = 16
    d_inner: int = 4096
    d_head: int | None = None  # d_model / n_head if None, and no other is supported
    ff_activation: str = "gelu"
    dropout: float = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    clamp_len: int = -1  # the distance whose sinusoids larger ones have; none if below 1
    summary_type: str = "last"  # the token that a classifier reads
    summary_use_proj: bool = True
    summary_activation: str | None = "tanh"
    summary_last_dropout: float = 0.1
    pad_token_id: int | None = 5

    hidden_size = property(lambda self: self.d_model)
    num_hidden_layers = property(lambda self: self.n_layer)
    num_attention_heads = property(lambda self: self.n_head)
    intermediate_size = property(lambda self: self.d_inner)
    hidden_act = property(lambda self: self.ff_activation)
    hidden_dropout_prob = property(lambda self: self.dropout)
    attention_probs_dropout_prob = property(lambda self: self.dropout)
    max_position_embeddings = property(lambda self: 512)  # of its pre-training; the model has no limit
    type_vocab_size = property(lambda self: 3)  # of the first text, the second, and the last token
    recompute = property(lambda self: False)
    keep_activation = property(lambda self: False)

    def head_dropout(self) -> float:
        return 0.0  # the encoder's output has dropout

    def _wrong(self) -> str | None:
        if (wrong := super()._wrong()) is not None:
            return wrong
        activation = self.summary_activation
        for name, holds, expected in (
            ("d_head", self.d_head in (None, self.d_model // self.n_head), "d_model / n_head"),
            ("summary_type", self.summary_type in _SUMMARIES, f"one of {', '.join(_SUMMARIES)}"),
            ("summary_activation", not activation or activation in FUNCTIONS, f"null or one of {', '.join(FUNCTIONS)}"),
        ):
            if not holds:
                return f"{name}: expected {expected}, got {getattr(self, name)!r}"
        return None


# ---- names in checkpoints --------------------------------------------------------------------------------------------

OF_TOKENS, OF_SEQUENCES = rule("classifier", "classifier"), rule("classifier", "logits_proj")


def names_of(config: Any, *classifiers: Rule) -> Names:
    """The names of parameters; the first of ``classifiers`` is that of the model."""
    attention, heads = "layer.*.rel_attn", config.n_head
    ours = "encoder.layers.*"
    return Names(
        prefix="transformer",
        base=(
            rule("embeddings.word", "word_embedding"),
            rule("mask_emb", "mask_emb"),
            rule(f"{ours}.qkv.weight", *(f"{attention}.{part}" for part in "qkv"), transpose=True, heads=heads),
            rule(f"{ours}.out.weight", f"{attention}.o", heads=heads),
            rule(f"{ours}.position_key.weight", f"{attention}.r", transpose=True, heads=heads),
            rule(f"{ours}.content_bias", f"{attention}.r_w_bias"),
            rule(f"{ours}.position_bias", f"{attention}.r_r_bias"),
            rule(f"{ours}.segment_bias", f"{attention}.r_s_bias"),
            rule(f"{ours}.segment", f"{attention}.seg_embed"),
            rule(f"{ours}.norm1", f"{attention}.layer_norm"),
            rule(f"{ours}.up", "layer.*.ff.layer_1"),
            rule(f"{ours}.down", "layer.*.ff.layer_2"),
            rule(f"{ours}.norm2", "layer.*.ff.layer_norm"),
        ),
        heads=(
            rule("lm_head.decoder", "lm_loss"),
            rule("summary", "sequence_summary.summary"),
            *classifiers,
            rule("qa_outputs", "qa_outputs"),
        ),
    )
