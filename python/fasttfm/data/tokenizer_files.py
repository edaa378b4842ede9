"""``load_tokenizer``: reads the tokenizer files of models.

tokenizer.json               the format of the tokenizers library
vocab.txt                    WordPiece: BERT, DistilBERT and ELECTRA
vocab.json and merges.txt    BPE: of bytes for GPT-2 and RoBERTa, of characters for GPT
*.model                      SentencePiece: ALBERT (``spiece.model``), XLM-RoBERTa, CamemBERT, DeBERTa, or your own
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fasttfm.data.lines import data_error, read_lines
from fasttfm.data.sentencepiece_model import SentencePieceModel, read_sentencepiece
from fasttfm.data.tokenizer import Tokenizer, finished, library, special_by_name
from fasttfm.data.tokenizer_training import wordpiece
from fasttfm.models.checkpoint_files import CONFIG
from fasttfm.models.directories import PARTS, checkpoint_directory
from fasttfm.models.hub import TOKENIZER_FILES, Part

_EXPECTED = "a tokenizer.json, a vocab.txt, a vocab.json with merges.txt or a SentencePiece .model"
_WORD_END = "</w>"  # the suffix of GPT's tokens that end a word


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer from a ``tokenizer.json``, a ``vocab.txt``, a ``vocab.json`` with ``merges.txt``, a
    SentencePiece ``.model``, a folder with one of them, the directory of any model, or a hub model
    (``model_directory``). Special tokens are those that the folder's settings name, or else those with a well-known
    name."""
    is_hub_id = isinstance(path, str) and not Path(path).exists()
    if not is_hub_id and not Path(path).is_dir():
        return _read_tokenizer(Path(path))
    folder = checkpoint_directory(path, Part.TOKENIZER)
    # ELECTRA's two models have one tokenizer, in a folder of theirs or in the one above.
    others = [folder.parent] if folder.name in PARTS else [folder / part for part in PARTS]
    return _read_tokenizer(next((directory for directory in (folder, *others) if _has_tokenizer(directory)), folder))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES) or any(folder.glob("*.model"))


def _read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder or a file."""
    tokenizers = library()
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        files = [path / name for name in TOKENIZER_FILES if (path / name).is_file()] or sorted(path.glob("*.model"))
        if not files:
            raise data_error(path, _EXPECTED, "none of them")
        path = files[0]
    if not path.is_file():
        raise data_error(path, f"a folder, {_EXPECTED}", "nothing there")
    settings = {**_settings(folder / "special_tokens_map.json"), **_settings(folder / "tokenizer_config.json")}
    if path.suffix == ".txt" and path.name != "merges.txt":
        return _from_vocabulary(path, settings)
    if path.suffix == ".model":
        return _from_sentencepiece(path, settings)
    if path.name in ("vocab.json", "merges.txt"):
        return _from_merges(folder, settings)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise data_error(path, "a tokenizer.json of the tokenizers library", str(error)) from None
    backend.no_padding()
    backend.no_truncation()
    return Tokenizer(backend, special_by_name(backend, settings), lowercase=bool(settings.get("do_lower_case", False)))


def _settings(path: Path) -> dict[str, Any]:
    return _json_object(path) if path.is_file() else {}


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise data_error(path, "a JSON object", str(error)) from None
    if not isinstance(value, dict):
        raise data_error(path, "a JSON object", type(value).__name__)
    return value


def _lowercase(settings: dict[str, Any], pieces: Any) -> bool:
    """Whether the tokenizer lowercases texts: as the settings say, or if no piece is capitalized."""
    return bool(settings.get("do_lower_case", not any(name.isascii() and name.istitle() for name in pieces)))


# ---- WordPiece -------------------------------------------------------------------------------------------------------


def _from_vocabulary(path: Path, settings: dict[str, Any]) -> Tokenizer:
    tokenizers = library()
    vocabulary: dict[str, int] = {}
    for number, name in read_lines(path):
        if name in vocabulary:
            raise data_error(path, "every token once", f"{name!r} as in line {vocabulary[name] + 1}", line=number)
        vocabulary[name] = number - 1
    if "[UNK]" not in vocabulary:
        raise data_error(
            path, "a WordPiece vocabulary with [UNK], one token per line", f"{len(vocabulary)} lines without"
        )
    lowercase = _lowercase(settings, vocabulary)
    # By default BERT strips accents if it lowercases.
    accents = {"strip_accents": settings.get("strip_accents"), "lowercase": lowercase}
    normalizer = tokenizers.normalizers.BertNormalizer(
        **accents, handle_chinese_chars=settings.get("tokenize_chinese_chars", True)
    )
    backend = wordpiece(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"), normalizer)
    return finished(backend, special_by_name(backend, settings), lowercase)


# ---- BPE -------------------------------------------------------------------------------------------------------------


def _from_merges(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    tokenizers = library()
    vocabulary = _json_object(folder / "vocab.json")
    if not vocabulary or not all(type(id) is int for id in vocabulary.values()):
        raise data_error(folder / "vocab.json", "an object with an id for each token", f"{str(vocabulary)[:60]}")
    merges = _merges(folder / "merges.txt", vocabulary)
    if any(name.endswith(_WORD_END) for name in vocabulary):  # GPT's: characters of lowercased words
        model = tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", end_of_word_suffix=_WORD_END)
        backend = tokenizers.Tokenizer(model)
        backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        backend.decoder = tokenizers.decoders.BPEDecoder(suffix=_WORD_END)
        return finished(backend, special_by_name(backend, settings), True)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    space = bool(settings.get("add_prefix_space", False))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=space)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return finished(backend, special_by_name(backend, settings), False)


def _merges(path: Path, vocabulary: dict[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for number, line in read_lines(path):
        if (number == 1 and line.startswith("#version")) or not line.strip():
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2:
            raise data_error(path, "two tokens that are merged", f"{line[:60]!r}", line=number)
        for name in (*pair, "".join(pair)):
            if name not in vocabulary:
                raise data_error(path, "tokens of vocab.json", f"{name!r}", line=number)
        merges.append((pair[0], pair[1]))
    return merges


# ---- SentencePiece ---------------------------------------------------------------------------------------------------

# Models of fairseq have ids of their own: these tokens, then the pieces from a number on, and <mask>.
_START = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
_FAIRSEQ = {
    "xlmroberta": (_START, 3),
    "camembert": ([("<s>NOTUSED", 0.0), _START[1], ("</s>NOTUSED", 0.0), _START[3], ("<unk>NOTUSED", -100.0)], 1),
}

_MASK = "[MASK]"  # DeBERTa's, which its SentencePiece model does not have


def _with_ids_of(folder: Path, settings: dict[str, Any], model: SentencePieceModel) -> SentencePieceModel:
    """The pieces with the ids of the model that the folder's files name."""
    config = _settings(folder / CONFIG)
    for named in (settings.get("tokenizer_class"), config.get("tokenizer_class"), config.get("model_type")):
        kind = str(named).lower().replace("-", "").removesuffix("fast").removesuffix("tokenizer")
        if kind in _FAIRSEQ:
            start, first = _FAIRSEQ[kind]
            return replace(model, pieces=[*start, *model.pieces[first:], ("<mask>", 0.0)], unknown=3)
        if kind == "debertav2" and _MASK not in (piece for piece, _ in model.pieces):
            return replace(model, pieces=[*model.pieces, (_MASK, 0.0)])
    return model


def _from_sentencepiece(path: Path, settings: dict[str, Any]) -> Tokenizer:
    tokenizers = library()
    model = _with_ids_of(path.parent, settings, read_sentencepiece(path))
    lowercase = _lowercase(settings, (piece.removeprefix("▁") for piece, _ in model.pieces))
    backend = tokenizers.Tokenizer(_sentencepiece_backend(model))
    backend.normalizer = _sentencepiece_normalizer(model, settings, lowercase)
    scheme = "always" if model.dummy_prefix else "never"
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    return finished(backend, special_by_name(backend, settings), lowercase)


def _sentencepiece_backend(model: SentencePieceModel) -> Any:
    models = library().models
    if model.kind == "unigram":
        return models.Unigram(model.pieces, model.unknown, byte_fallback=model.byte_fallback)
    ids = {piece: id for id, (piece, _) in enumerate(model.pieces)}
    scores = dict(model.pieces)
    # Every split of a piece into two pieces is a merge; those of pieces with higher scores come first.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in ids
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    merges.sort(key=lambda pair: (-scores[pair[0] + pair[1]], ids[pair[0]], ids[pair[1]]))
    unknown = model.pieces[model.unknown][0]
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _sentencepiece_normalizer(model: SentencePieceModel, settings: dict[str, Any], lowercase: bool) -> Any:
    """ALBERT's normalizer (by default lower case without accents), followed by the model's own."""
    tokenizers = library()
    forms = tokenizers.normalizers
    steps = []
    if not settings.get("keep_accents", not lowercase):
        steps += [forms.NFKD(), forms.StripAccents()]
    if lowercase:
        steps.append(forms.Lowercase())
    if model.character_map:
        steps.append(forms.Precompiled(model.character_map))
    if model.single_spaces:
        steps += [forms.Strip(), forms.Replace(tokenizers.Regex(r"\s{2,}"), " ")]
    return forms.Sequence(steps)
