"""``Tokenizer``: text to ids and back, over the ``tokenizers`` library; trained, loaded, saved as HF's tools want."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fasttfm import extras
from fasttfm.atomic_files import atomic_writes, json_text
from fasttfm.data.texts import DataError, data_error
from fasttfm.models.config import ModelConfig
from fasttfm.models.families import family_of_type
from fasttfm.models.hub import Part, model_directory

Kind = Literal["wordpiece", "bpe"]


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the special tokens; None for those that a vocabulary does not have."""

    pad: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None

    def all(self) -> list[int]:
        return sorted({value for value in asdict(self).values() if value is not None})


# The names under which vocabularies have them, the likeliest first.
_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>", "<|endoftext|>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
}
_WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BPE_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # RoBERTa's, with its ids


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
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids, and for each its range of characters of ``text``: from, to."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)
        return text

    def token(self, id: int) -> str:
        """An id's entry in the vocabulary."""
        name: str | None = self.backend.id_to_token(int(id))
        if name is None:
            raise ValueError(f"Tokenizer: id: expected one in [0, {self.vocab_size}), got {id}")
        return name

    @property
    def starts_word(self) -> np.ndarray:
        """bool [vocab_size]: whether a token begins a word; the others go on with the one before."""
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

    @property
    def fingerprint(self) -> str:
        """The same for the same vocabulary, rules and special tokens."""
        text = json.dumps([json.loads(self.backend.to_str()), asdict(self.special)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def save(self, directory: str | Path, *, model_max_length: int = 512, config: ModelConfig | None = None) -> None:
        """Writes what ``load_tokenizer`` and ``transformers.AutoTokenizer`` open.

        Args:
            model_max_length: The most tokens that the model reads.
            config: The model's configuration, which decides the inputs that transformers passes to it: segments
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
            if family is not None and family.causal and self._wraps_texts():
                rules["post_processor"] = None
        contents = {
            "tokenizer.json": json.dumps(rules, indent=2, ensure_ascii=False),
            "tokenizer_config.json": json_text(settings),
            "special_tokens_map.json": json_text(names),
        }
        with atomic_writes([folder / name for name in contents]) as partials:
            for name, text in contents.items():
                partials[folder / name].write_text(text, encoding="utf-8")

    def _wraps_texts(self) -> bool:
        """Whether transformers puts [CLS] or [SEP] around a text."""
        return not {self.special.cls, self.special.sep}.isdisjoint(self.backend.encode("").ids)


def train_tokenizer(
    kind: Kind, documents: Iterable[str], vocab_size: int, *, lowercase: bool = True, progress: bool = False
) -> Tokenizer:
    """A vocabulary of ``documents``: the same texts in the same order give the same one, in every process.

    Args:
        kind: ``"wordpiece"`` (BERT's, with [PAD], [UNK], [CLS], [SEP], [MASK]) or ``"bpe"`` (bytes, as the GPTs' and
            RoBERTa's, with ``<s>``, ``<pad>``, ``</s>``, ``<unk>``, ``<mask>``).
        documents: Texts; ``read_documents`` gives them. WordPiece goes over them twice, the second
            time in a temporary file.
        vocab_size: The maximum number of entries, including special ones; fewer if the texts have no more.
        lowercase: Words in lower case and without accents; WordPiece only.
        progress: Shows how far it is.
    """
    library = _library()
    if kind not in ("wordpiece", "bpe"):
        raise ValueError(f"train_tokenizer: kind: expected 'wordpiece' or 'bpe', got {kind!r}")
    special = _WORDPIECE_SPECIAL if kind == "wordpiece" else _BPE_SPECIAL
    least = len(special) + (256 if kind == "bpe" else 1)
    if vocab_size < least:
        raise ValueError(f"train_tokenizer: vocab_size: expected at least {least} for {kind}, got {vocab_size}")
    options = {"vocab_size": vocab_size, "special_tokens": list(special), "show_progress": progress}
    if kind == "wordpiece":
        vocabulary = _wordpiece_vocabulary(library, documents, lowercase, options)
        backend = _wordpiece(library, library.models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase)
    else:
        lowercase = False
        backend = library.Tokenizer(library.models.BPE())
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(initial_alphabet=sorted(alphabet), **options)
        backend.train_from_iterator(_pieces(documents), trainer)
    return _finish(library, backend, _special_by_name(backend, {}), lowercase)


def _wordpiece_vocabulary(
    library: Any, documents: Iterable[str], lowercase: bool, options: dict[str, Any]
) -> dict[str, int]:
    """The ids of a WordPiece vocabulary: special tokens, letters, letters inside words (##a), then merges.

    The library numbers letters inside words in the order of a hash table that differs from process to process, and of
    two pairs that are equally frequent it merges the one with the smaller numbers. So a first pass over the texts,
    which merges nothing, finds these letters, and the second one gets them in order, as if they were special tokens.
    """

    def trained(pieces: Iterable[str], vocab_size: int, first: list[str]) -> list[str]:
        backend = _wordpiece(library, library.models.WordPiece(unk_token="[UNK]"), lowercase)
        changes = {"vocab_size": vocab_size, "special_tokens": first}
        backend.train_from_iterator(pieces, library.trainers.WordPieceTrainer(**{**options, **changes}))
        ids = backend.get_vocab()
        return sorted(ids, key=ids.__getitem__)

    special: list[str] = options["special_tokens"]
    with _repeated(_pieces(documents)) as pieces:
        letters = trained(pieces(), 0, special)[len(special) :]
        inside = sorted(name for name in letters if len(name) > 1)
        found = trained(pieces(), options["vocab_size"], [*special, *inside])
    rest = found[len(special) + len(inside) :]
    alphabet, merges = rest[: len(letters) - len(inside)], rest[len(letters) - len(inside) :]
    return {name: id for id, name in enumerate([*special, *alphabet, *inside, *merges])}


@contextlib.contextmanager
def _repeated(pieces: Iterable[str]) -> Iterator[Callable[[], Iterator[str]]]:
    """An iterable of the pieces, which contain no newline, that can be iterated repeatedly."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogatepass", newline="\n") as file:

        def give() -> Iterator[str]:
            if file.tell():
                file.seek(0)
                yield from (line[:-1] for line in file)
                return
            for piece in pieces:
                file.write(f"{piece}\n")
                yield piece

        yield give


def load_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer from a folder, a ``tokenizer.json``, a ``vocab.txt`` or a model of the hub (``model_directory``)."""
    library = _library()
    is_hub_id = isinstance(path, str) and not Path(path).exists()
    path = model_directory(path, Part.TOKENIZER) if is_hub_id else Path(path)
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "vocab.txt") if (path / name).is_file()]
        if not found:
            raise data_error(path, "a tokenizer.json or a vocab.txt", "neither")
        path = found[0]
    if not path.is_file():
        raise data_error(path, "a folder, a tokenizer.json or a vocab.txt", "nothing there")
    settings = {**_settings(folder / "special_tokens_map.json"), **_settings(folder / "tokenizer_config.json")}
    lowercase = bool(settings.get("do_lower_case", False))
    if path.suffix == ".txt":
        return _from_vocabulary(library, path, settings)
    try:
        backend = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise data_error(path, "a tokenizer.json of the tokenizers library", str(error)) from None
    backend.no_padding()
    backend.no_truncation()
    return Tokenizer(backend, _special_by_name(backend, settings), lowercase=lowercase)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
        import tokenizers.trainers
    except ImportError:
        raise extras.missing("reading and training tokenizers", "tokenizers", "train") from None
    return tokenizers


def _wordpiece(library: Any, model: Any, lowercase: bool) -> Any:
    """BERT's rules around a WordPiece model."""
    backend = library.Tokenizer(model)
    backend.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    backend.decoder = library.decoders.WordPiece()
    return backend


def _from_vocabulary(library: Any, path: Path, settings: dict[str, Any]) -> Tokenizer:
    from fasttfm.data.texts import read_lines

    vocabulary: dict[str, int] = {}
    for number, name in read_lines(path):
        if name in vocabulary:
            raise data_error(path, "every token once", f"{name!r} as in line {vocabulary[name] + 1}", line=number)
        vocabulary[name] = number - 1
    if "[UNK]" not in vocabulary:
        raise data_error(
            path, "a WordPiece vocabulary with [UNK], one token a line", f"{len(vocabulary)} lines without"
        )
    lowercase = bool(settings.get("do_lower_case", not any(name.isascii() and name.istitle() for name in vocabulary)))
    backend = _wordpiece(library, library.models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase)
    return _finish(library, backend, _special_by_name(backend, settings), lowercase)


def _finish(library: Any, backend: Any, special: SpecialIds, lowercase: bool) -> Tokenizer:
    """Marks the special tokens, and says how HF's tools put them around a text and a pair."""
    names = [backend.id_to_token(id) for id in special.all()]
    backend.add_special_tokens([library.AddedToken(name, special=True, normalized=False) for name in names])
    if special.cls is not None and special.sep is not None:
        first, last = backend.id_to_token(special.cls), backend.id_to_token(special.sep)
        between = f"{last} {last}" if first == "<s>" else last  # RoBERTa's pairs have two
        backend.post_processor = library.processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {between} $B:1 {last}:1",
            special_tokens=[(first, special.cls), (last, special.sep)],
        )
    return Tokenizer(backend, special, lowercase=lowercase)


def _special_by_name(backend: Any, settings: dict[str, Any]) -> SpecialIds:
    """The special tokens that a folder's settings name, else those with a known name."""
    found: dict[str, int | None] = {}
    for role, known in _NAMES.items():
        named = settings.get(f"{role}_token")
        named = named.get("content") if isinstance(named, dict) else named
        candidates = [named] if isinstance(named, str) else known
        ids = (backend.token_to_id(name) for name in candidates)
        found[role] = next((id for id in ids if id is not None), None)
    return SpecialIds(**found)


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise data_error(path, "a JSON object", str(error)) from None
    if not isinstance(settings, dict):
        raise data_error(path, "a JSON object", type(settings).__name__)
    return settings


def _pieces(documents: Iterable[str], size: int = 1 << 12) -> Iterable[str]:
    """The texts in pieces of lines: training takes long over a word of many thousand letters."""
    empty = True
    for document in documents:
        for line in document.split("\n"):
            for start in range(0, len(line), size):
                empty = False
                yield line[start : start + size]
    if empty:
        raise DataError("train_tokenizer: documents: expected texts, got none or only empty ones")
