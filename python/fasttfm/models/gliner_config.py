"""GLiNER's configuration, ``gliner_config.json``, and what of the published variants is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import write_json
from fasttfm.models.checkpoint_files import CheckpointError, read_json
from fasttfm.models.deberta_v2_config import DebertaV2Config
from fasttfm.models.directories import checkpoint_directory
from fasttfm.models.hub import GLINER_CONFIG

MODEL_TYPE = "gliner_uni_encoder_span"
# The supported values of fields that select another architecture; the first is the default.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE, "gliner"),
    "span_mode": ("markerV0",),
    "subtoken_pooling": ("first",),
    "words_splitter_type": ("whitespace",),
    "fuse_layers": (False,),
    "post_fusion_schema": ("",),
    "labels_encoder": (None,),  # of bi-encoders
    "labels_decoder": (None,),  # of models that generate the types
    "relations_layer": (None,),  # of models that find relations, too
    "span_encoder_config": (None,),
    "precomputed_prompts_mode": (None, False),
}


@dataclass
class GLiNERConfig:
    """A GLiNER model with one encoder that scores spans. Fields have the names of ``gliner_config.json``; ``extra``
    keeps its other fields, to write them back.

    Args:
        encoder_config: The encoder's configuration, or its fields. If None, it is that of ``model_name``, a directory
            or hub id, which ``GLiNER.from_pretrained`` reads.
        hidden_size: The width of words, spans and types. If it is not the encoder's, a linear layer maps to it.
        max_width: The maximum number of words of an entity.
        max_len: The maximum number of words of a text.
        num_rnn_layers: The layers of the LSTM over words; 0 for none.
        embed_ent_token: Whether a type is read from its ``ent_token``, or from the token after it.
        class_token_index: The id of ``ent_token``; -1 for that of the tokenizer, to which it is added.
        vocab_size: The rows of the encoder's word table; -1 for those of the checkpoint.
    """

    model_name: str = "microsoft/deberta-v3-small"
    encoder_config: DebertaV2Config | dict[str, Any] | None = None
    hidden_size: int = 512
    max_width: int = 12
    max_len: int = 384
    dropout: float = 0.4
    num_rnn_layers: int = 1
    embed_ent_token: bool = True
    ent_token: str = "<<ENT>>"
    sep_token: str = "<<SEP>>"
    class_token_index: int = -1
    vocab_size: int = -1
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.check()
        if isinstance(self.encoder_config, dict):
            self.encoder_config = DebertaV2Config.from_dict(self.encoder_config)
        if self.encoder_config is not None:
            self.encoder_config.check()

    @property
    def encoder(self) -> DebertaV2Config:
        """The encoder's configuration. Raises ValueError without one."""
        if not isinstance(self.encoder_config, DebertaV2Config):
            raise ValueError(f"GLiNERConfig: encoder_config: expected a DebertaV2Config, got {self.encoder_config!r}")
        return self.encoder_config

    def check(self) -> None:
        """Raises ValueError for a value outside of its range, or a variant that is not supported."""
        for name, allowed in _SUPPORTED.items():
            value = self.extra.get(name)  # null is the default
            if value is not None and value not in allowed:
                expected = "none" if allowed[0] is None else repr(allowed[0])
                raise ValueError(f"GLiNERConfig: {name}: expected {expected} (others are not supported), got {value!r}")
        for name, least in (("hidden_size", 1), ("max_width", 1), ("max_len", 1), ("num_rnn_layers", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"GLiNERConfig: {name}: expected a whole number from {least} on, got {value!r}")
        if self.num_rnn_layers and self.hidden_size % 2:
            raise ValueError(f"GLiNERConfig: hidden_size: expected an even number, got {self.hidden_size}")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"GLiNERConfig: dropout: expected a number in [0, 1), got {self.dropout!r}")
        encoder = self.encoder_config
        kind = encoder.get("model_type", "deberta-v2") if isinstance(encoder, dict) else "deberta-v2"
        if not isinstance(encoder, (DebertaV2Config, dict, type(None))) or kind != "deberta-v2":
            got = kind if isinstance(encoder, dict) else type(encoder).__name__
            raise ValueError(f"GLiNERConfig: encoder_config: model_type: expected 'deberta-v2', got {got!r}")

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, revision: str | None = None, token: str | bool | None = None
    ) -> GLiNERConfig:
        """Reads ``gliner_config.json`` of a directory or hub model."""
        path = checkpoint_directory(directory, revision=revision, token=token) / GLINER_CONFIG
        try:
            return cls.from_dict(read_json(path))
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GLiNERConfig:
        names = {each.name for each in dataclasses.fields(cls)} - {"extra"}
        known = {name: value for name, value in values.items() if name in names}
        return cls(**known, extra={name: value for name, value in values.items() if name not in names})

    def to_dict(self) -> dict[str, Any]:
        """The fields as the gliner package writes them."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "extra"}
        if self.encoder_config is not None:
            fields["encoder_config"] = self.encoder.to_dict()
        defaults = {name: _SUPPORTED[name][0] for name in ("model_type", "span_mode", "subtoken_pooling")}
        return {**defaults, **self.extra, **fields}

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes ``gliner_config.json``."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / GLINER_CONFIG, self.to_dict(), sort_keys=True)
