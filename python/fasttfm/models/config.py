"""What configurations of all families share: HF's field names, and the way from and to ``config.json``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fasttfm.models.checkpoint_files import CONFIG, CheckpointError, read_json
from fasttfm.whole_files import write_json

Config = TypeVar("Config", bound="ModelConfig")


@dataclass
class ModelConfig:
    """A model's configuration. Fields have HF's names; ``extra`` keeps what else a file says, to write it back."""

    model_type: ClassVar[str] = ""
    sizes: ClassVar[dict[str, dict[str, Any]]] = {}  # named sizes: the fields in which they differ from the defaults
    required: ClassVar[dict[str, tuple[Any, ...]]] = {}  # of fields that we do not have: what they may say

    num_labels: int = 2
    problem_type: str | None = None
    tie_word_embeddings: bool = True
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def named(cls: type[Config], size: str, **changes: Any) -> Config:
        """The configuration of a published size, for example ``BertConfig.named("base")``."""
        if size not in cls.sizes:
            raise ValueError(f"{cls.__name__}: size: expected one of {', '.join(cls.sizes)}, got {size!r}")
        return cls(**{**cls.sizes[size], **changes})

    @classmethod
    def from_pretrained(cls: type[Config], directory: str | Path) -> Config:
        """Reads ``config.json``."""
        path = Path(directory) / CONFIG
        found = read_json(path)
        if found.get("model_type", cls.model_type) != cls.model_type:
            raise CheckpointError(f"{path}: model_type: expected {cls.model_type!r}, got {found['model_type']!r}")
        for name, allowed in cls.required.items():
            if name in found and found[name] not in allowed:
                expected = " or ".join(repr(value) for value in allowed)
                raise CheckpointError(
                    f"{path}: {name}: expected {expected} (others are not supported), got {found[name]!r}"
                )
        return cls.from_dict(found)

    @classmethod
    def from_dict(cls: type[Config], values: dict[str, Any]) -> Config:
        fields = {each.name for each in dataclasses.fields(cls)} - {"extra"}
        known = {name: value for name, value in values.items() if name in fields}
        if "num_labels" not in known and isinstance(values.get("id2label"), dict):
            known["num_labels"] = len(values["id2label"])
        extra = {name: value for name, value in values.items() if name not in fields and name != "model_type"}
        return cls(**known, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """As HF writes it: the number of labels is that of their names."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "extra"}
        labels = fields.pop("num_labels")
        values = {**self.extra, **fields, "model_type": self.model_type}
        if len(values.get("id2label") or range(2)) != labels:
            values["id2label"] = {str(index): f"LABEL_{index}" for index in range(labels)}
            values["label2id"] = {f"LABEL_{index}": index for index in range(labels)}
        return {name: value for name, value in values.items() if value is not None or name in self.extra}

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes ``config.json``."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / CONFIG, self.to_dict(), sort_keys=True)
