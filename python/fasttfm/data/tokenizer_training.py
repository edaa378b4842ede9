"""``train_tokenizer``: trains a WordPiece, byte-level BPE or Unigram vocabulary on texts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer import Tokenizer, finished, library, special_by_name

Kind = Literal["wordpiece", "bpe", "unigram"]
KINDS = ("wordpiece", "bpe", "unigram")
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # with RoBERTa's ids


def train_tokenizer(
    kind: Kind,
    documents: Iterable[str],
    vocab_size: int,
    *,
    lowercase: bool = True,
    strip_accents: bool = False,
    special: Literal["bert", "roberta"] | None = None,
    progress: bool = False,
) -> Tokenizer:
    """Trains a vocabulary on ``documents``. For WordPiece and BPE the same texts in the same order give the same
    vocabulary in every process; the library's Unigram trainer does not guarantee that.

    Args:
        kind: ``"wordpiece"`` (BERT), ``"bpe"`` (byte-level, as in the GPTs and RoBERTa; lossless) or ``"unigram"``
            (ALBERT and XLM-RoBERTa, words with a leading ``▁``).
        documents: Texts, for example of ``read_documents``. WordPiece reads them twice, the second time from a
            temporary file.
        vocab_size: The maximum number of entries, including special tokens; fewer if the texts do not have as many.
        lowercase: Whether to lowercase texts; only for WordPiece and Unigram.
        strip_accents: Whether to remove accents; only for WordPiece and Unigram. Hangul stays composed.
        special: The special tokens: ``"bert"`` ([PAD], [UNK], [CLS], [SEP], [MASK], the default of WordPiece) or
            ``"roberta"`` (``<s>``, ``<pad>``, ``</s>``, ``<unk>``, ``<mask>``, the default of the others).
        progress: Whether to show the progress.
    """
    tokenizers = library()
    if kind not in KINDS:
        raise ValueError(f"train_tokenizer: kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    of_bert = special == "bert" if special is not None else kind == "wordpiece"
    names = list(_BERT_SPECIAL if of_bert else _ROBERTA_SPECIAL)
    least = len(names) + (256 if kind == "bpe" else 1)
    if vocab_size < least:
        raise ValueError(f"train_tokenizer: vocab_size: expected at least {least} for {kind}, got {vocab_size}")
    unknown = "[UNK]" if of_bert else "<unk>"
    options: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": names, "show_progress": progress}
    if kind == "wordpiece":
        normalizer = _bert_normalizer(lowercase, strip_accents)
        vocabulary = _wordpiece_vocabulary(documents, normalizer, unknown, options)
        backend = wordpiece(tokenizers.models.WordPiece(vocabulary, unk_token=unknown), normalizer)
    elif kind == "unigram":
        backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
        backend.normalizer = _unigram_normalizer(lowercase, strip_accents)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        backend.decoder = tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer(unk_token=unknown, **options)
        backend.train_from_iterator(_pieces(documents), trainer)
    else:
        lowercase = False
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=sorted(alphabet), **options)
        backend.train_from_iterator(_pieces(documents), trainer)
    return finished(backend, special_by_name(backend, {}), lowercase)


def wordpiece(model: Any, normalizer: Any) -> Any:
    """A WordPiece model with BERT's pre-tokenizer and decoder."""
    tokenizers = library()
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    return backend


def _bert_normalizer(lowercase: bool, strip_accents: bool) -> Any:
    """BERT's normalizer with NFC before and after it, because stripping accents decomposes characters."""
    forms = library().normalizers
    of_bert = forms.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    return forms.Sequence([forms.NFC(), of_bert, *([forms.NFC()] if strip_accents else [])])


def _unigram_normalizer(lowercase: bool, strip_accents: bool) -> Any:
    """NFC and single spaces, as in SentencePiece."""
    tokenizers = library()
    forms = tokenizers.normalizers
    stripped = [forms.NFD(), forms.StripAccents()] if strip_accents else []
    spaces = [forms.Replace(tokenizers.Regex(r"\s+"), " "), forms.Strip()]
    return forms.Sequence([*stripped, forms.NFC(), *([forms.Lowercase()] if lowercase else []), *spaces])


def _wordpiece_vocabulary(
    documents: Iterable[str], normalizer: Any, unknown: str, options: dict[str, Any]
) -> dict[str, int]:
    """The ids of a WordPiece vocabulary: special tokens, characters, characters inside words (##a), then merges.

    The library numbers characters inside words in the order of a hash table that differs between processes, and of two
    equally frequent pairs it merges the one with the smaller numbers. So a first pass over the texts, which merges
    nothing, finds these characters, and the second pass gets them in a fixed order, as if they were special tokens.
    """
    tokenizers = library()

    def trained(pieces: Iterable[str], vocab_size: int, first: list[str]) -> list[str]:
        backend = wordpiece(tokenizers.models.WordPiece(unk_token=unknown), normalizer)
        changes = {"vocab_size": vocab_size, "special_tokens": first}
        backend.train_from_iterator(pieces, tokenizers.trainers.WordPieceTrainer(**{**options, **changes}))
        ids = backend.get_vocab()
        return sorted(ids, key=ids.__getitem__)

    special: list[str] = options["special_tokens"]
    with _repeated(_pieces(documents)) as pieces:
        letters = trained(pieces(), 0, special)[len(special) :]
        inside = sorted(name for name in letters if len(name) > 1)
        vocabulary = trained(pieces(), options["vocab_size"], [*special, *inside])
    rest = vocabulary[len(special) + len(inside) :]
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


def _pieces(documents: Iterable[str], size: int = 1 << 12) -> Iterable[str]:
    """Yields the lines of texts in pieces of at most ``size`` characters: training is slow for very long words."""
    empty = True
    for document in documents:
        for line in document.split("\n"):
            for start in range(0, len(line), size):
                empty = False
                yield line[start : start + size]
    if empty:
        raise DataError("train_tokenizer: documents: expected texts, got none or only empty ones")
