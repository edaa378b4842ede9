"""``Tokenizer``: text to ids and back, by the ``tokenizers`` library, saved in transformers' format.

``tokenizer_training`` trains one, ``tokenizer_files`` reads one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttfm import _extras
from fasttfm._atomic_files import atomic_writes, json_text
from fasttfm.models.config import ModelConfig
from fasttfm.models.families import family_of_type


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the special tokens, None if the vocabulary does not have one."""

    pad: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None

    def all(self) -> list[int]:
        return sorted({value for value in asdict(self).values() if value is not None})


# The names of special tokens in vocabularies, the most likely first.
_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>", "<|endoftext|>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
}


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with its special tokens. ``train_tokenizer`` and ``load_tokenizer`` make one.

    ``encode`` returns only the ids of the text; [CLS], [SEP] and the like are added when examples are built.
    """

    def __init__(self, backend: Any, special: SpecialIds, *, lowercase: bool = False) -> None:
        self.backend = backend
        self.special = special
        self.lowercase = lowercase
        self.vocab_size: int = backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids, and for each the range of its characters in ``text``."""
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)  # releases the GIL; encode does not
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)
        return text

    def token(self, id: int) -> str:
        """The vocabulary's entry for an id."""
        name: str | None = self.backend.id_to_token(int(id))
        if name is None:
            raise ValueError(f"Tokenizer: id: expected one in [0, {self.vocab_size}), got {id}")
        return name

    @property
    def starts_word(self) -> np.ndarray:
        """bool [vocab_size]: whether a token starts a word; the others continue one."""
        state = json.loads(self.backend.to_str())
        names = [self.backend.id_to_token(id) or "" for id in range(self.vocab_size)]
        special = {self.backend.id_to_token(id) for id in self.special.all()}
        prefix = state["model"].get("continuing_subword_prefix")
        marks = json.dumps([state.get("pre_tokenizer"), state.get("decoder")])
        if prefix and state["model"]["type"] == "WordPiece":
            starts = [not name.startswith(prefix) for name in names]
        elif '"ByteLevel"' in marks:  # Ġ, Ċ and ĉ represent space, newline and tab
            starts = [name[:1] in ("Ġ", "Ċ", "ĉ") or not name[:1].isalnum() for name in names]
        elif '"Metaspace"' in marks:
            starts = [name.startswith("▁") for name in names]
        else:
            starts = [True] * len(names)
        return np.array([start or name in special for start, name in zip(starts, names, strict=True)], dtype=bool)

    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens that transformers puts before and after a text."""
        inner = self.backend.encode("a", add_special_tokens=False).ids
        ids = self.backend.encode("a").ids
        first = next(start for start in range(len(ids)) if ids[start : start + len(inner)] == inner)
        return ids[:first], ids[first + len(inner) :]

    @property
    def separators(self) -> int:
        """The number of separators that transformers puts between two texts; 0 if it adds no special tokens."""
        added: list[int] = [self.backend.num_special_tokens_to_add(pair) for pair in (False, True)]
        return added[1] - added[0]

    @property
    def has_segments(self) -> bool:
        """Whether transformers gives the second of two texts segment 1."""
        return bool(self.backend.encode("a", "a").type_ids[-1])

    @property
    def fingerprint(self) -> str:
        """A hash of vocabulary, rules and special tokens."""
        text = json.dumps([json.loads(self.backend.to_str()), asdict(self.special)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def save(self, directory: str | Path, *, model_max_length: int = 512, config: ModelConfig | None = None) -> None:
        """Writes the files that ``load_tokenizer`` and ``transformers.AutoTokenizer`` read.

        Args:
            model_max_length: The maximum number of tokens that the model reads.
            config: The model's configuration, which determines the inputs that transformers passes to it: segments
                (``token_type_ids``) if it has them, and no [CLS] and [SEP] around the prompt of a causal model.
        """
        folder = Path(directory)
        names = {f"{name}_token": self.token(id) for name, id in asdict(self.special).items() if id is not None}
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model_max_length,
            "do_lower_case": self.lowercase,
            "clean_up_tokenization_spaces": False,
            **names,
        }
        rules = json.loads(self.backend.to_str())
        if config is not None:
            segments = getattr(config, "type_vocab_size", 0) > 1
            settings["model_input_names"] = ["input_ids", *["token_type_ids"] * segments, "attention_mask"]
            family = family_of_type(config.model_type)
            if family is not None and family.task_tokens and self._adds_special_tokens():
                rules["post_processor"] = None
            if family is not None and family.last_token:
                rules["post_processor"], settings["padding_side"] = self._ending_template(), "left"
        contents = {
            "tokenizer.json": json.dumps(rules, indent=2, ensure_ascii=False),
            "tokenizer_config.json": json_text(settings),
            "special_tokens_map.json": json_text(names),
        }
        with atomic_writes([folder / name for name in contents]) as partials:
            for name, text in contents.items():
                partials[folder / name].write_text(text, encoding="utf-8")

    def _ending_template(self) -> Any:
        """XLNet's rule: [SEP] after each text and [CLS] at the end, with a segment of its own."""
        first, last = self.token(self.special.cls or 0), self.token(self.special.sep or 0)
        backend = library().Tokenizer.from_str(self.backend.to_str())
        backend.post_processor = library().processors.TemplateProcessing(
            single=f"$A {last} {first}:2",
            pair=f"$A {last} $B:1 {last}:1 {first}:2",
            special_tokens=[(first, self.special.cls), (last, self.special.sep)],
        )
        return json.loads(backend.to_str())["post_processor"]

    def _adds_special_tokens(self) -> bool:
        """Whether transformers puts [CLS] or [SEP] around a text."""
        return not {self.special.cls, self.special.sep}.isdisjoint(self.backend.encode("").ids)


# ---- shared by training and loading ----------------------------------------------------------------------------------


def library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
        import tokenizers.trainers
    except ImportError:
        raise _extras.missing("reading and training tokenizers", "tokenizers", "train") from None
    return tokenizers


def finished(backend: Any, special: SpecialIds, lowercase: bool) -> Tokenizer:
    """Marks the special tokens, and sets the template with which transformers puts them around a text and a pair."""
    tokenizers = library()
    names = [backend.id_to_token(id) for id in special.all()]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    if special.cls is not None and special.sep is not None:
        first, last = backend.id_to_token(special.cls), backend.id_to_token(special.sep)
        between = f"{last} {last}" if first == "<s>" else last  # RoBERTa's pairs have two
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {between} $B:1 {last}:1",
            special_tokens=[(first, special.cls), (last, special.sep)],
        )
    return Tokenizer(backend, special, lowercase=lowercase)


def special_by_name(backend: Any, settings: dict[str, Any]) -> SpecialIds:
    """The special tokens that a folder's settings name, or else those with a known name. [CLS] and [SEP] may also be
    the tokens that the backend puts around a text."""
    special: dict[str, int | None] = {}
    for role, known in _NAMES.items():
        named = settings.get(f"{role}_token")
        named = named.get("content") if isinstance(named, dict) else named
        candidates = [named] if isinstance(named, str) else known
        ids = (backend.token_to_id(name) for name in candidates)
        special[role] = next((id for id in ids if id is not None), None)
    if special["cls"] is None and special["sep"] is None and backend.num_special_tokens_to_add(False) == 2:
        special["cls"], *_, special["sep"] = backend.encode("a").ids
    return SpecialIds(**special)
