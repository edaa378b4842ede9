"""Tokenizers from the files of published models, and vocabularies of languages other than English."""

from __future__ import annotations

import json
import struct
import unicodedata
from pathlib import Path

import pytest

from fasttfm.data import DataError, load_tokenizer, train_tokenizer

pytest.importorskip("tokenizers", reason="fasttfm's tokenizers need the library tokenizers")
KOREAN = "우리는 오늘 조선이 독립한 나라임을 선언하노라"
TEXTS = ["Über die Brücke geht der Wal", "The whale swims, the whaler swims", KOREAN] * 4


# ---- trained ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_accents_and_hangul_are_kept(kind: str) -> None:
    """Also for decomposed texts (NFD), as from some file systems."""
    tokenizer = train_tokenizer(kind, TEXTS, 120)  # type: ignore[arg-type]
    for text in (KOREAN, "über brücke"):
        ids = tokenizer.encode(text)
        assert tokenizer.special.unk not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(unicodedata.normalize("NFD", text)) == ids
    assert tokenizer.encode("ÜBER") == tokenizer.encode("über")
    assert tokenizer.encode("über") != tokenizer.encode("uber")


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_accents_are_stripped_on_request_and_hangul_stays_composed(kind: str) -> None:
    tokenizer = train_tokenizer(kind, TEXTS, 120, strip_accents=True, lowercase=False)  # type: ignore[arg-type]
    assert tokenizer.decode(tokenizer.encode("Über Brücke")) == "Uber Brucke"
    assert tokenizer.decode(tokenizer.encode(KOREAN)) == KOREAN


def test_unigram_is_saved_for_transformers(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("unigram", TEXTS, 120, special="bert")
    special = tokenizer.special
    assert (special.pad, special.unk, special.cls, special.sep, special.mask) == (0, 1, 2, 3, 4)
    starts = tokenizer.starts_word
    assert starts[tokenizer.encode("the")[0]]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(KOREAN) == tokenizer.encode(KOREAN)
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert other(KOREAN)["input_ids"] == [special.cls, *tokenizer.encode(KOREAN), special.sep]


# ---- vocab.json and merges.txt ---------------------------------------------------------------------------------------


def write_merges(folder: Path, names: list[str], merges: list[str], version: str = "#version: 0.2\n") -> Path:
    (folder / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(names)}))
    (folder / "merges.txt").write_text(version + "".join(f"{line}\n" for line in merges))
    return folder


def test_bytes_of_gpt2(tmp_path: Path) -> None:
    names = [*"abcdehw", "Ġ", "Ġw", "Ġwh", "ha", "<|endoftext|>"]
    tokenizer = load_tokenizer(write_merges(tmp_path, names, ["Ġ w", "Ġw h", "h a"]))
    assert [tokenizer.token(id) for id in tokenizer.encode("ha wha")] == ["ha", "Ġwh", "a"]
    assert tokenizer.decode(tokenizer.encode("ha wha")) == "ha wha"
    assert tokenizer.special.eos == tokenizer.special.bos == names.index("<|endoftext|>")
    assert load_tokenizer(tmp_path / "vocab.json").fingerprint == tokenizer.fingerprint
    assert load_tokenizer(tmp_path / "merges.txt").fingerprint == tokenizer.fingerprint


def test_roberta_and_transformers_agree(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained = train_tokenizer("bpe", TEXTS, 320)
    state = json.loads(trained.backend.to_str())["model"]
    names = sorted(state["vocab"], key=state["vocab"].__getitem__)
    write_merges(tmp_path, names, [" ".join(pair) for pair in state["merges"]])
    tokenizer = load_tokenizer(tmp_path)
    other = transformers.RobertaTokenizer.from_pretrained(str(tmp_path))
    for text in (*TEXTS[:3], "  spaces  and\nlines 🐋"):
        assert tokenizer.encode(text) == other(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.special == trained.special


def test_letters_of_gpt(tmp_path: Path) -> None:
    names = ["<unk>", "w", "h", "a", "a</w>", "h</w>", "ha</w>", "wha</w>"]
    tokenizer = load_tokenizer(write_merges(tmp_path, names, ["h a</w>", "w ha</w>"]))
    assert [tokenizer.token(id) for id in tokenizer.encode("WHA ha xa")] == ["wha</w>", "ha</w>", "<unk>", "a</w>"]
    assert tokenizer.decode(tokenizer.encode("wha ha")) == "wha ha"


@pytest.mark.parametrize(
    ("names", "merges", "message"),
    [
        (["a", "b", "ab"], ["a b", "a b c"], "merges.txt, line 3: expected two tokens that are merged, got 'a b c'"),
        (["a", "b", "ab"], ["b a"], "merges.txt, line 2: expected tokens of vocab.json, got 'ba'"),
        ([], [], "vocab.json: expected an object with an id for each token"),
    ],
)
def test_merges_that_do_not_fit(tmp_path: Path, names: list[str], merges: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tokenizer(write_merges(tmp_path, names, merges))


def test_merges_are_missing(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(DataError, match=r"merges\.txt: expected a readable file, got No such file or directory"):
        load_tokenizer(tmp_path)


# ---- SentencePiece ---------------------------------------------------------------------------------------------------


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protocol buffer; lengths below 128."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([*([number << 3] if number < 16 else [number << 3 & 0x7F | 0x80, number >> 4]), value])
    return bytes([number << 3 | 2, len(value)]) + value


def model_file(path: Path, kind: int, pieces: list[tuple[str, float, int]]) -> Path:
    content = b"".join(
        field(1, field(1, piece.encode()) + field(2, score) + field(3, type)) for piece, score, type in pieces
    )
    path.write_bytes(content + field(2, field(3, kind)) + field(3, field(1, b"identity")))
    return path


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁", -3.0, 1), ("▁wha", -1.0, 1), ("le", -1.5, 1)]
PIECES += [(letter, -4.0, 1) for letter in "whale"]


def test_unigram_of_sentencepiece(tmp_path: Path) -> None:
    model_file(tmp_path / "spiece.model", 1, PIECES)
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.token(id) for id in tokenizer.encode(" Whale  wha")] == ["▁wha", "le", "▁wha"]
    assert (tokenizer.special.unk, tokenizer.special.bos, tokenizer.special.eos) == (0, 1, 2)
    assert tokenizer.decode(tokenizer.encode("whale wha")) == "whale wha"
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert 0 in load_tokenizer(tmp_path).encode("Whale")


@pytest.mark.parametrize(
    ("file", "fields", "first", "special"),
    [
        ("config.json", {"model_type": "xlm-roberta"}, 1, (0, 2)),
        ("config.json", {"model_type": "bert", "tokenizer_class": "XLMRobertaTokenizer"}, 1, (0, 2)),
        ("tokenizer_config.json", {"tokenizer_class": "CamembertTokenizerFast"}, 4, (5, 6)),
    ],
)
def test_ids_of_fairseq(
    tmp_path: Path, file: str, fields: dict[str, str], first: int, special: tuple[int, int]
) -> None:
    """XLM-RoBERTa's ids are those of SentencePiece plus 1, and CamemBERT's plus 4, behind their own special tokens."""
    model_file(tmp_path / "sentencepiece.bpe.model", 1, PIECES)
    plain = load_tokenizer(tmp_path)
    (tmp_path / file).write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("whale wha") == [id + first for id in plain.encode("whale wha")]
    assert (tokenizer.special.cls, tokenizer.special.sep) == special
    assert (tokenizer.special.pad, tokenizer.special.unk) == (1, 3)
    assert tokenizer.special.mask == tokenizer.vocab_size - 1 == len(PIECES) + first
    assert tokenizer.encode("?")[-1] == 3
    cls, sep = special
    assert tokenizer.backend.encode("").ids == [cls, sep]
    assert tokenizer.separators == 2


DEBERTA = [("[PAD]", 0.0, 3), ("[CLS]", 0.0, 3), ("[SEP]", 0.0, 3), ("[UNK]", 0.0, 2), *PIECES[3:]]


def test_ids_of_deberta(tmp_path: Path) -> None:
    """Those of transformers, from its tokenizer.json and from the SentencePiece model, which lacks [MASK]."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.DebertaV2Tokenizer(vocab=[(piece, score) for piece, score, _ in DEBERTA])
    theirs.save_pretrained(tmp_path / "json")
    (tmp_path / "spm").mkdir()
    model_file(tmp_path / "spm" / "spm.model", 1, DEBERTA)
    (tmp_path / "spm" / "config.json").write_text('{"model_type": "deberta-v2"}')
    (tmp_path / "spm" / "tokenizer_config.json").write_text('{"do_lower_case": false, "vocab_type": "spm"}')
    for folder in ("json", "spm"):
        ours = load_tokenizer(tmp_path / folder)
        special = ours.special
        assert (special.pad, special.cls, special.sep, special.unk, special.mask) == (0, 1, 2, 3, len(DEBERTA))
        assert ours.vocab_size == len(theirs)
        for text in ("whale wha", "a?", "  le  [MASK] whale", "Whale"):
            assert ours.backend.encode(text).ids == theirs(text).input_ids, (folder, text)
        pair = ours.backend.encode("le", "wha")
        assert (pair.ids, pair.type_ids) == (theirs("le", "wha").input_ids, theirs("le", "wha").token_type_ids)


def test_tokens_around_a_text_that_no_file_names(tmp_path: Path) -> None:
    """As in mmBERT: [CLS] and [SEP] are called <bos> and <eos>."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "whale"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="<unk>")
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.special.cls, tokenizer.special.sep, tokenizer.special.mask) == (2, 1, 4)
    assert (tokenizer.separators, tokenizer.has_segments) == (1, False)


def test_bpe_of_sentencepiece(tmp_path: Path) -> None:
    """Merges are ordered by score: "al" precedes "le"."""
    pieces = [*PIECES[:4], ("al", -0.5, 1), ("le", -1.0, 1), ("ale", -2.0, 1), *PIECES[6:]]
    tokenizer = load_tokenizer(model_file(tmp_path / "own.model", 2, pieces))
    assert [tokenizer.token(id) for id in tokenizer.encode("ale lle")] == ["▁", "ale", "▁", "l", "le"]


def test_sentencepiece_itself_agrees(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="compares with the library sentencepiece")
    texts = [*TEXTS, "ﬁne ½ e\u0301", "  two   spaces\tand tabs ", "🐋 x"]
    for kind in ("unigram", "bpe"):
        options = {"model_type": kind, "vocab_size": 90, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / kind), byte_fallback=False, **options
        )
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / f"{kind}.model"))
        ours = load_tokenizer(tmp_path / f"{kind}.model")
        for text in texts:
            assert ours.encode(text) == theirs.encode(text), (kind, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no protocol buffer", "expected a SentencePiece model, got another file"),
        (b"\x0a\x7fcut", "expected a SentencePiece model, got another file"),
        (b"", "expected a SentencePiece model with one unknown piece, got 0 of 0 pieces"),
        (field(2, field(3, 3)), "expected a unigram or BPE model of SentencePiece, got words"),
    ],
)
def test_invalid_sentencepiece_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(DataError, match=f"a.model: {message}"):
        load_tokenizer(tmp_path / "a.model")
