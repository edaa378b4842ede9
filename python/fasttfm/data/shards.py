"""``TokenShards``: the token ids of a corpus in memory-mapped files, which ``prepare`` writes.

A folder has ``starts_word.npy``, bool [vocabulary], ``shards.json`` (the texts, the tokenizer, and checksums of every
file and of itself), and for each shard

    00000.tokens.npy     uint16 or uint32 [tokens]
    00000.sentences.npy  int64 [sentences + 1]   sentence i has the tokens from [i] to [i + 1]
    00000.documents.npy  int64 [documents + 1]   document i has the sentences from [i] to [i + 1]
    00000.json           the shard's record, written last, from which an interrupted preparation resumes
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fasttfm._atomic_files import atomic_write, write_json
from fasttfm.data.lines import DataError, data_error
from fasttfm.data.sentences import sentence_starts
from fasttfm.data.texts import files_of, read_documents
from fasttfm.data.tokenizer import SpecialIds, Tokenizer

FORMAT = 2
_MANIFEST = "shards.json"
_PARTS = ("tokens", "sentences", "documents")
_STARTS_WORD = "starts_word.npy"
_SHARD_FILE = re.compile(r"(\d{5,})\.(?:json|(?:tokens|sentences|documents)\.npy)")


@dataclass(frozen=True)
class TokenShards:
    """The documents of a corpus as token ids. ``open`` reads a folder of ``prepare``; ``split`` makes a validation
    set."""

    directory: Path
    manifest: dict[str, Any]
    index: np.ndarray  # int64 [documents, 5]: shard, first sentence, sentences, first token, tokens
    files: tuple[dict[str, np.ndarray], ...]  # each shard's tokens, sentences and documents, memory-mapped

    @staticmethod
    def open(directory: str | Path, *, verify: bool = True) -> TokenShards:
        """Opens a prepared folder.

        Args:
            directory: A folder that ``prepare`` has written.
            verify: Whether to read every file once and compare checksums (a gigabyte or more per second).
        """
        folder = Path(directory)
        manifest = _read_manifest(folder)
        _check_file(folder / _STARTS_WORD, manifest["starts_word"], checksum=verify)
        for record in manifest["shards"]:
            _check_files(folder, record, checksums=verify)
        arrays = tuple(
            {part: np.asarray(np.load(folder / f"{number:05d}.{part}.npy", mmap_mode="r")) for part in _PARTS}
            for number in range(len(manifest["shards"]))
        )
        return TokenShards(folder, manifest, index_of(arrays), arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the directory and the index: another process maps the files itself."""
        return _reopen, (self.directory, self.index)

    @property
    def documents(self) -> int:
        return len(self.index)

    @property
    def tokens(self) -> int:
        return int(self.index[:, 4].sum())

    @property
    def vocab_size(self) -> int:
        size: int = self.manifest["vocab_size"]
        return size

    @property
    def special(self) -> SpecialIds:
        return SpecialIds(**self.manifest["special"])

    @property
    def starts_word(self) -> np.ndarray:
        """bool [vocab_size]: whether a token starts a word."""
        starts: np.ndarray = np.load(self.directory / _STARTS_WORD)
        return starts

    @property
    def fingerprint(self) -> str:
        """A hash of the documents and the tokenizer, which does not depend on the directory."""
        state = [self.manifest["tokenizer"], [record["digest"] for record in self.manifest["shards"]]]
        chosen = np.ascontiguousarray(self.index).tobytes()
        return hashlib.blake2b(json.dumps(state).encode() + chosen, digest_size=16).hexdigest()

    def document(self, number: int) -> np.ndarray:
        """The ids of a document, a view of the mapped file."""
        shard, _, _, start, length = self.index[number].tolist()
        return self.files[shard]["tokens"][start : start + length]

    def sentences(self, number: int) -> np.ndarray:
        """int64 [sentences + 1]: the starts of the sentences in ``document(number)``, and its length."""
        shard, sentence, count, start, _ = self.index[number].tolist()
        return (self.files[shard]["sentences"][sentence : sentence + count + 1]) - start

    def split(self, held_out: float = 0.02) -> tuple[TokenShards, TokenShards]:
        """Splits the documents into a training set and a validation set with a fraction of about ``held_out``. The
        split is always the same."""
        if not 0 < held_out < 1:
            raise ValueError(f"TokenShards.split: held_out: expected a fraction between 0 and 1, got {held_out}")
        if self.documents < 2:
            raise data_error(self.directory, "two documents or more to hold some out", f"{self.documents}")
        count = min(max(1, round(held_out * self.documents)), self.documents - 1)
        order = np.random.Generator(np.random.Philox(key=self.documents)).permutation(self.documents)
        kept, held = np.sort(order[count:]), np.sort(order[:count])
        return replace(self, index=self.index[kept]), replace(self, index=self.index[held])


def _reopen(directory: Path, index: np.ndarray) -> TokenShards:
    return replace(TokenShards.open(directory, verify=False), index=index)


def prepare(
    source: Any,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    workers: int | None = None,
    progress: bool = True,
    shard_characters: int = 16_000_000,
    column: str = "text",
) -> TokenShards:
    """Writes the ids of ``source`` into ``directory`` and opens them.

    Complete shards are kept: a second call with the same texts and tokenizer does nothing, and a call after an
    interruption continues. If several processes call it for the same folder, one works and the others wait.

    Args:
        source: The argument of ``read_documents``. Files that are unchanged (size and time) are not read again.
        tokenizer: The tokenizer.
        directory: A folder that has nothing else; other texts or another tokenizer replace its content.
        workers: The number of shards that are written in parallel; the number of cores by default.
        progress: Whether to show a progress bar, if tqdm is installed.
        shard_characters: The number of characters after which a shard is full.
        column: The argument of ``read_documents``.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"tokenizer": tokenizer.fingerprint, "shard_characters": shard_characters, "files": _files(source)}
    identity["column"] = column
    with _locked(folder):
        if identity["files"] and (ready := _unchanged(folder, identity)) is not None:
            return ready
        writer = _Writer(folder, tokenizer, (os.cpu_count() or 1) if workers is None else workers)
        records = writer.write(_groups(_shown(read_documents(source, column=column), progress), shard_characters))
        if not sum(record["tokens"] for record in records):
            name = str(source) if isinstance(source, (str, Path)) else f"prepare: source ({type(source).__name__})"
            raise DataError(f"{name}: expected text, got no document with a token")
        facts = {"format": FORMAT, "vocab_size": tokenizer.vocab_size, "special": asdict(tokenizer.special)}
        facts["starts_word"] = _write_array(folder / _STARTS_WORD, tokenizer.starts_word)
        manifest = {**facts, **identity, "shards": records}
        write_json(folder / _MANIFEST, {**manifest, "crc32": _own_checksum(manifest)}, indent=1)
        _remove_stale(folder, len(records))
    return TokenShards.open(folder, verify=False)


def _unchanged(folder: Path, identity: dict[str, Any]) -> TokenShards | None:
    """The content of ``folder``, if it is complete and from the same files and tokenizer."""
    try:
        manifest = _read_manifest(folder)
        if any(manifest.get(key) != value for key, value in identity.items()):
            return None
        return TokenShards.open(folder)
    except DataError:
        return None  # damaged: the shards are written again


# ---- writing ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes groups of documents as shards, several in parallel, and keeps existing ones that are up to date.

    It uses threads, because tokenizing releases the GIL and is itself parallel.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, workers: int) -> None:
        self.folder, self.tokenizer, self.workers = folder, tokenizer, max(1, workers)
        self.identity = tokenizer.fingerprint

    def write(self, groups: Iterable[list[str]]) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        waiting: deque[Future[dict[str, Any]]] = deque()
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for number, documents in enumerate(groups):
                    waiting.append(pool.submit(self.shard, number, documents))
                    if len(waiting) > self.workers:
                        records.append(waiting.popleft().result())
                records += [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return records

    def shard(self, number: int, documents: list[str]) -> dict[str, Any]:
        record_path = self.folder / f"{number:05d}.json"
        digest = self._digest(documents)
        try:
            stored = _read_json(record_path)
            if stored["digest"] == digest:
                _check_files(self.folder, stored, checksums=True)
                return stored
        except (DataError, LookupError, TypeError, AttributeError):
            pass  # missing, half-written or damaged: written again
        record_path.unlink(missing_ok=True)
        # From here on the manifest does not describe the folder.
        (self.folder / _MANIFEST).unlink(missing_ok=True)
        arrays = token_arrays(self.tokenizer, documents)
        record: dict[str, Any] = {"number": number, "digest": digest, "documents": len(arrays["documents"]) - 1}
        record |= {"tokens": len(arrays["tokens"]), "files": {}}
        for part, array in arrays.items():
            record["files"][part] = _write_array(self.folder / f"{number:05d}.{part}.npy", array)
        write_json(record_path, record, indent=1)
        return record

    def _digest(self, documents: list[str]) -> str:
        digest = hashlib.blake2b(self.identity.encode(), digest_size=16)
        for document in documents:
            data = document.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()


def token_arrays(tokenizer: Tokenizer, documents: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of a shard: tokens, sentences and documents. Documents and sentences without tokens are skipped."""
    dtype = token_dtype(tokenizer.vocab_size)
    tokens, sentences, counts = [], [np.zeros(1, np.int64)], [0]
    total = 0
    for start in range(0, len(documents), 256):
        texts = documents[start : start + 256]
        for text, encoding in zip(texts, tokenizer.backend.encode_batch(texts, add_special_tokens=False), strict=True):
            ids = np.array(encoding.ids, dtype=dtype)
            if not len(ids):
                continue
            ends = np.fromiter((end for _, end in encoding.offsets), np.int64, len(ids))
            starts = np.array(sentence_starts(text), dtype=np.int64)
            # A sentence starts with the first token that ends after the sentence's first character.
            firsts = np.searchsorted(np.maximum.accumulate(ends), starts, side="right")
            bounds = np.unique(np.append(firsts[firsts > 0], len(ids)))
            tokens.append(ids)
            sentences.append(total + bounds)
            counts.append(len(bounds))
            total += len(ids)
    return {
        "tokens": np.concatenate([np.zeros(0, dtype), *tokens]),
        "sentences": np.concatenate(sentences),
        "documents": np.cumsum(counts, dtype=np.int64),
    }


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type of token ids in files."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _groups(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def _shown(documents: Iterator[str], progress: bool) -> Iterator[str]:
    if not progress:
        return documents
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return documents
    return _counted(documents, tqdm(unit="B", unit_scale=True, desc="tokenizing", leave=False))


def _counted(documents: Iterator[str], bar: Any) -> Iterator[str]:
    with bar:
        for document in documents:
            bar.update(len(document))
            yield document


def _files(source: Any) -> list[list[Any]]:
    """Name, size and modification time of the files of ``source``; empty if it is not a path."""
    files = [file for path in files_of(source) or [] for file in (sorted(path.glob("*")) if path.is_dir() else [path])]
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _remove_stale(folder: Path, shards: int) -> None:
    for path in folder.iterdir():
        match = _SHARD_FILE.fullmatch(path.name)
        if match is not None and int(match[1]) >= shards:
            path.unlink()


# ---- files -----------------------------------------------------------------------------------------------------------


def index_of(arrays: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """``TokenShards.index`` of the arrays of some shards."""
    rows = [np.zeros((0, 5), np.int64)]
    for shard, parts in enumerate(arrays):
        sentences = np.asarray(parts["documents"])
        starts = np.asarray(parts["sentences"])[sentences]
        first = (np.full(len(sentences) - 1, shard), sentences[:-1], np.diff(sentences))
        columns = (*first, starts[:-1], np.diff(starts))
        rows.append(np.stack(columns, axis=1))
    return np.concatenate(rows)


def _write_array(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Writes an array, and returns the size and checksum that ``_check_file`` compares."""
    with atomic_write(path) as partial:
        with partial.open("wb") as file:
            np.save(file, array)
        return {"bytes": partial.stat().st_size, "crc32": _checksum(partial)}


def _check_files(folder: Path, record: dict[str, Any], *, checksums: bool) -> None:
    for part in _PARTS:
        _check_file(folder / f"{record['number']:05d}.{part}.npy", record["files"][part], checksum=checksums)


def _check_file(path: Path, facts: dict[str, Any], *, checksum: bool) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != facts["bytes"]:
        raise data_error(path, f"{facts['bytes']} bytes", "no file" if size is None else f"{size} bytes")
    if checksum and (actual := _checksum(path)) != facts["crc32"]:
        raise data_error(path, f"checksum {facts['crc32']}", f"{actual}: the file is damaged; remove it, prepare again")


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def _own_checksum(manifest: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    if not path.is_file():
        raise data_error(folder, "prepared shards (shards.json)", "a folder without" if folder.is_dir() else "nothing")
    manifest = _read_json(path)
    if manifest.get("format") != FORMAT:
        raise data_error(path, f"format {FORMAT}", f"format {manifest.get('format')!r}")
    if manifest.pop("crc32", None) != _own_checksum(manifest):
        raise data_error(path, "the file that fasttfm wrote", "another content: the file is damaged; prepare again")
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    """A record that ``prepare`` has written."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise data_error(path, "the file that fasttfm wrote", f"no JSON ({error})") from None
    if not isinstance(value, dict):
        raise data_error(path, "the file that fasttfm wrote", "another JSON file")
    return value


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
