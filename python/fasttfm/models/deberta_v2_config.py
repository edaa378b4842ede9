"""DeBERTa's configuration, and the names of its parameters in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fasttfm.models.bert import BASE_NAMES, BertConfig
from fasttfm.models.checkpoint_names import Names, rule, untied
from fasttfm.nn.disentangled_layer import FUNCTIONS, Distances

_V3: dict[str, Any] = {
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
_V2 = {**_V3, "conv_kernel_size": 3, "conv_act": "gelu"}
_BASE = {**_V3, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}


@dataclass
class DebertaV2Config(BertConfig):
    model_type: ClassVar[str] = "deberta-v2"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {**BertConfig.sizes["tiny"], **_V3},
        "xsmall": {**_BASE, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
        "small": {**_BASE, "num_hidden_layers": 6},
        "base": _BASE,
        "large": {**_V3, **BertConfig.sizes["large"]},
        "xlarge": _V2,
        "xxlarge": {**_V2, "num_hidden_layers": 48},
    }

    vocab_size: int = 128100
    hidden_size: int = 1536
    num_hidden_layers: int = 24
    num_attention_heads: int = 24
    intermediate_size: int = 6144
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-7
    embedding_size: int | None = None  # of the tables; hidden_size if None
    attention_head_size: int | None = None  # hidden_size / num_attention_heads if None, and no other is supported
    relative_attention: bool = False
    max_relative_positions: int = -1  # max_position_embeddings if below 1
    position_buckets: int = -1  # one row for every distance if below 1
    position_biased_input: bool = True  # whether embeddings have positions, too
    pos_att_type: list[str] | str | None = None
    share_att_key: bool = False
    norm_rel_ebd: str = "none"  # "layer_norm" for a LayerNorm of the rows of distances
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"
    pooler_dropout: float = 0.0
    pooler_hidden_act: str = "gelu"
    cls_dropout: float | None = None  # before classifiers of sequences and choices; hidden_dropout_prob if None
    legacy: bool = True  # whether the head for masked tokens is that of DeBERTa's checkpoints in transformers

    def __post_init__(self) -> None:
        if isinstance(self.pos_att_type, str):
            self.pos_att_type = [name.strip() for name in self.pos_att_type.lower().split("|")]

    def head_dropout(self) -> float:
        return self.hidden_dropout_prob if self.cls_dropout is None else self.cls_dropout

    def _wrong(self) -> str | None:
        if (wrong := super()._wrong()) is not None:
            return wrong
        names = f"one of {', '.join(FUNCTIONS)}"
        for name, holds, expected in (
            ("pos_att_type", {*(self.pos_att_type or [])} <= {"c2p", "p2c"}, "c2p, p2c or both"),
            (
                "attention_head_size",
                self.attention_head_size in (None, self.hidden_size // self.num_attention_heads),
                "hidden_size / num_attention_heads",
            ),
            ("conv_kernel_size", self.conv_kernel_size == 0 or self.conv_kernel_size % 2, "0 or an odd number"),
            ("conv_act", self.conv_act in FUNCTIONS, names),
            ("pooler_hidden_act", self.pooler_hidden_act in FUNCTIONS, names),
        ):
            if not holds:
                return f"{name}: expected {expected}, got {getattr(self, name)!r}"
        return None

    def distances(self) -> Distances:
        """What attention reads of distances."""
        farthest = self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings
        terms = self.pos_att_type or []
        return Distances(
            farthest if self.position_buckets < 1 else self.position_buckets,
            None if self.position_buckets < 1 else farthest,
            content_to_position="c2p" in terms,
            position_to_content="p2c" in terms,
            used=self.relative_attention,
            shared=self.share_att_key,
        )


# ---- names in checkpoints --------------------------------------------------------------------------------------------

_SELF, _HEAD = "encoder.layer.*.attention.self", "lm_predictions.lm_head"
NAMES = Names(
    prefix="deberta",
    base=(
        *(base_rule for base_rule in BASE_NAMES if base_rule.ours not in ("encoder.layers.*.qkv", "pooler")),
        rule("embeddings.projection", "embeddings.embed_proj"),
        rule("distances", "encoder.rel_embeddings"),
        rule("distance_norm", "encoder.LayerNorm"),
        rule("encoder.layers.0.convolution.conv", "encoder.conv.conv"),
        rule("encoder.layers.0.convolution.norm", "encoder.conv.LayerNorm"),
        rule("encoder.layers.*.qkv", *(f"{_SELF}.{part}_proj" for part in ("query", "key", "value"))),
        rule("encoder.layers.*.position_key", f"{_SELF}.pos_key_proj"),
        rule("encoder.layers.*.position_query", f"{_SELF}.pos_query_proj"),
    ),
    heads=(
        rule("lm_head.dense", "cls.predictions.transform.dense"),
        rule("lm_head.norm", "cls.predictions.transform.LayerNorm"),
        rule("lm_head.decoder.bias", "cls.predictions.bias"),
        rule("lm_head.decoder", "cls.predictions.decoder"),
        rule("summary", "pooler.dense"),
        rule("classifier", "classifier"),
        rule("qa_outputs", "qa_outputs"),
    ),
    ignored=(r"deberta\.embeddings\.position_ids", r"mask_predictions\..*", r"lm_predictions\..*"),
)
UNTIED_NAMES = untied(NAMES, r"cls\.predictions\.bias")
PAPERS_NAMES = replace(  # with the paper's head for masked tokens, whose decoder is the word table
    NAMES,
    heads=(
        rule("lm_head.dense", f"{_HEAD}.dense"),
        rule("lm_head.norm", f"{_HEAD}.LayerNorm"),
        rule("lm_head.decoder.bias", f"{_HEAD}.bias"),
        rule("lm_head.decoder", f"{_HEAD}.decoder"),
        *NAMES.heads[4:],
    ),
    ignored=(*NAMES.ignored[:2], r"cls\.predictions\..*"),
)


def names_of(config: DebertaV2Config) -> Names:
    """The names of parameters. Published files may have a table of positions that the model does not read."""
    names = NAMES if config.tie_word_embeddings else UNTIED_NAMES
    names = names if config.legacy else PAPERS_NAMES
    positions = () if config.position_biased_input else (r"deberta\.embeddings\.position_embeddings\..*",)
    return replace(names, ignored=(*names.ignored, *positions))
