"""The common part of all configurations: transformers' field names, loading and saving of ``config.json``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from fasttfm._atomic_files import write_json
from fasttfm.models.checkpoint_files import CONFIG, CheckpointError, read_json
from fasttfm.models.directories import checkpoint_directory
from fasttfm.models.hub import Part

Config = TypeVar("Config", bound="ModelConfig")


@dataclass
class ModelConfig:
    """A model's configuration. Fields have transformers' names; ``extra`` keeps other fields of a file, to write them
    back."""

    model_type: ClassVar[str] = ""
    sizes: ClassVar[dict[str, dict[str, Any]]] = {}  # named sizes: the fields in which they differ from the defaults
    config_files: ClassVar[tuple[str, ...]] = (CONFIG,)  # names of its file in checkpoints; the first is written
    required: ClassVar[dict[str, tuple[Any, ...]]] = {  # the supported values of fields that we do not have
        "return_dict": (True, None),
        "torchscript": (False, None),
    }

    num_labels: int = 2
    problem_type: str | None = None
    tie_word_embeddings: bool = True
    output_hidden_states: bool | None = False  # what calls return that do not say it themselves
    output_attentions: bool | None = False
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def named(cls: type[Config], size: str, **changes: Any) -> Config:
        """The configuration of a published size, for example ``BertConfig.named("base")``."""
        if size not in cls.sizes:
            raise ValueError(f"{cls.__name__}: size: expected one of {', '.join(cls.sizes)}, got {size!r}")
        return cls(**{**cls.sizes[size], **changes})

    @classmethod
    def from_pretrained(
        cls: type[Config], directory: str | Path, *, revision: str | None = None, token: str | bool | None = None
    ) -> Config:
        """Reads ``config.json`` of a directory or hub model (``checkpoint_directory``), or the file of another name
        that the family's releases have."""
        folder = checkpoint_directory(directory, Part.CONFIG, revision=revision, token=token)
        paths = [folder / name for name in cls.config_files]
        path = next((path for path in paths if path.is_file()), paths[0])
        values = read_json(path)
        if values.get("model_type", cls.model_type) != cls.model_type:
            raise CheckpointError(f"{path}: model_type: expected {cls.model_type!r}, got {values['model_type']!r}")
        labels = values.get("id2label") or {}
        if not isinstance(labels, dict) or not all(number.isdigit() for number in labels):
            raise CheckpointError(f"{path}: id2label: expected an object with a label for each number, got {labels!r}")
        config = cls.from_dict(values)
        if (wrong := config._wrong()) is not None:
            raise CheckpointError(f"{path}: {wrong}")
        return config

    @classmethod
    def from_dict(cls: type[Config], values: dict[str, Any]) -> Config:
        fields = {field.name for field in dataclasses.fields(cls)} - {"extra"}
        known = {name: value for name, value in values.items() if name in fields}
        if "num_labels" not in known and isinstance(values.get("id2label"), dict):
            known["num_labels"] = len(values["id2label"])
        extra = {name: value for name, value in values.items() if name not in fields and name != "model_type"}
        return cls(**known, extra=extra)

    def check(self) -> None:
        """Raises ValueError for a field of the wrong type or outside of its range."""
        if (wrong := self._wrong()) is not None:
            raise ValueError(f"{type(self).__name__}: {wrong}")

    def _wrong(self) -> str | None:
        for name, allowed in self.required.items():
            if name in self.extra and self.extra[name] not in allowed:
                expected = " or ".join(repr(value) for value in allowed if value is not None)
                return f"{name}: expected {expected} (others are not supported), got {self.extra[name]!r}"
        for name, accepts, expected in _rules(type(self)):
            if not accepts(value := getattr(self, name)):
                return f"{name}: expected {expected}, got {value!r}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The fields as transformers writes them: the number of labels is that of their names. None is written only if
        it is not the default, which a reader assumes for a missing field."""
        own_fields = [field for field in dataclasses.fields(self) if field.name != "extra"]
        unset = {field.name for field in own_fields if field.default is None} - self.extra.keys()
        fields = {field.name: getattr(self, field.name) for field in own_fields}
        labels = fields.pop("num_labels")
        values = {**self.extra, **fields, "model_type": self.model_type}
        if len(values.get("id2label") or range(2)) != labels:
            values["id2label"] = {str(index): f"LABEL_{index}" for index in range(labels)}
            values["label2id"] = {f"LABEL_{index}": index for index in range(labels)}
        return {name: value for name, value in values.items() if value is not None or name not in unset}

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes ``config.json``."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / CONFIG, self.to_dict(), sort_keys=True)


_LEAST = {  # a model may have none
    "type_vocab_size": 0,
    "num_entities": 0,
    "clamp_len": -1,
    "conv_kernel_size": 0,
    "max_relative_positions": -1,
    "position_buckets": -1,
}


def _rules(cls: type[ModelConfig]) -> Iterator[tuple[str, Callable[[Any], bool], str]]:
    """For every field: its name, a predicate for its values, and a description of it. Sizes and counts are at least 1,
    dropout probabilities below 1, and only ids may be negative."""
    hints = get_type_hints(cls)
    for name in (declared.name for declared in dataclasses.fields(cls) if declared.name != "extra"):
        kinds = get_args(hints[name]) or (hints[name],)
        rules = [_rule(name, kind) for kind in kinds]
        words = ", ".join(expected for _, expected in rules[:-1])
        words = f"{words} or {rules[-1][1]}" if words else rules[-1][1]
        yield name, functools.partial(_any_accepts, [accepts for accepts, _ in rules]), words


def _any_accepts(rules: list[Callable[[Any], bool]], value: Any) -> bool:
    return any(accepts(value) for accepts in rules)


def _rule(name: str, kind: Any) -> tuple[Callable[[Any], bool], str]:
    if kind is int and name.endswith("_id"):
        return _is_whole, "a whole number"
    if kind is int:
        least = _LEAST.get(name, 1)
        return lambda value: _is_whole(value) and value >= least, f"a whole number from {least} on"
    if kind is float and "drop" in name:
        return lambda value: _is_number(value) and 0 <= value <= 1, "a number in [0, 1]"
    if kind is float:
        return lambda value: _is_number(value) and 0 <= value < math.inf, "a number from 0 on"
    if kind is bool:
        return lambda value: isinstance(value, bool), "true or false"
    if kind is str:
        return lambda value: isinstance(value, str), "a text"
    if kind is type(None):
        return lambda value: value is None, "null"
    if kind == list[str]:
        return lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of texts"
    return lambda value: isinstance(value, list) and all(map(_is_whole, value)), "a list of whole numbers"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
