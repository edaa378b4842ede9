"""Streams of shards: every document once in an epoch, the same batches for any ranks and workers, exact resumption."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import socket
import tarfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from traced_corpus import FIRST, word_tokenizer

from fasttfm.data import Batch, DataError, Masking, SequenceFormat, ShardStream, StreamedShards, shard_files
from fasttfm.data.shard_files import ShardFile
from fasttfm.data.tokenizing import arrays_of

fsspec = pytest.importorskip("fsspec")
WORDS = 3000
TOKENIZER = word_tokenizer(WORDS)
END = 5  # its end token
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".tar", ".tar.gz", ".npy")


def texts() -> list[str]:
    """Documents of 3 to 60 words, all of them different."""
    random, documents, word = np.random.default_rng(0), [], 0
    while word < WORDS - 60:
        count = int(random.integers(3, 60))
        documents.append(" ".join(f"w{number}" for number in range(word, word + count)))
        word += count
    return documents


TEXTS = texts()


def contents(suffix: str, documents: Sequence[str]) -> bytes:
    """A file with these documents."""
    out = io.BytesIO()
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"id": list(range(len(documents))), "text": documents})
        parquet.write_table(table, out, row_group_size=7)
    elif suffix.startswith(".jsonl"):
        out.write("".join(json.dumps({"text": text}) + "\n" for text in documents).encode())
    elif suffix.startswith(".tar"):
        with tarfile.open(fileobj=out, mode="w") as archive:
            for number, text in enumerate(documents):
                # Samples have other files, too, names longer than a tar header's field, and either kind of text.
                stem = f"{'folder/' * 20}{number:05d}"
                fields = {"txt": text.encode()} if number % 2 else {"json": json.dumps({"text": text}).encode()}
                for ending, content in {"cls": b"7", **fields}.items():
                    member = tarfile.TarInfo(f"{stem}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    else:
        np.save(out, np.concatenate([[*TOKENIZER.encode(text), END] for text in documents]).astype(np.uint16))
    return gzip.compress(out.getvalue()) if suffix.endswith("gz") else out.getvalue()


def write(folder: Path, suffix: str = ".parquet", files: int = 5) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        (folder / f"part-{number}{suffix}").write_bytes(contents(suffix, TEXTS[number::files]))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> StreamedShards:
    return StreamedShards.open(write(tmp_path_factory.mktemp("shards") / "files", ".jsonl"), TOKENIZER)


def stream(shards: StreamedShards, kind: Any = "single", **options: Any) -> ShardStream:
    options = {"tokens_per_batch": 128, "seed": 1, "batches_per_step": 4, "window_tokens": 200, **options}
    masking = None if kind == "causal" else Masking(mask_share=1.0, random_share=0.0)
    return ShardStream(shards, SequenceFormat(kind, 32), masking, **options)


def values(batches: Iterator[Batch], count: int) -> list[Any]:
    rows = []
    for batch in itertools.islice(batches, count):
        fields = (getattr(batch, name) for name in Batch.__dataclass_fields__)
        rows.append([value.tolist() if isinstance(value, torch.Tensor) else value for value in fields])
    return rows


def words(batch: Batch) -> list[int]:
    """The numbers of a batch's words, without masks."""
    ids = batch.input_ids.clone()
    if batch.positions is not None and batch.labels is not None:
        ids[batch.positions] = batch.labels
    return (ids[ids >= FIRST] - FIRST).tolist()


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_from_any_position_on(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"file{suffix}").write_bytes(contents(suffix, TEXTS[:30]))
    (file,) = shard_files.shard_files(tmp_path / f"file{suffix}")
    rows = list(file.rows(end=END))
    expected = [TOKENIZER.encode(text) for text in TEXTS[:30]] if suffix == ".npy" else TEXTS[:30]
    assert [row.tolist() if suffix == ".npy" else row for _, _, row in rows] == expected  # type: ignore[union-attr]
    for index, (_, following, _) in enumerate(rows):
        rest = list(file.rows(following, end=END))
        assert [position for position, *_ in rest] == [position for position, *_ in rows[index + 1 :]]
        assert all(np.array_equal(a, b) for (*_, a), (*_, b) in zip(rest, rows[index + 1 :], strict=True))


def test_long_documents_of_token_ids_are_divided_in_the_same_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_TOKENS", 10)
    np.save(tmp_path / "long.npy", np.array([*range(6, 12), END, *range(20, 73), END, END, *range(80, 84)]))
    (file,) = shard_files.shard_files(str(tmp_path / "*.npy"))
    rows = list(file.rows(end=END))
    assert np.concatenate([row for *_, row in rows]).tolist() == [*range(6, 12), *range(20, 73), *range(80, 84)]  # type: ignore[arg-type]
    assert max(len(row) for *_, row in rows) <= 20
    for index, (_, following, _) in enumerate(rows):
        rest = [row for *_, row in file.rows(following, end=END)]
        assert [list(row) for row in rest] == [list(row) for *_, row in rows[index + 1 :]]


def test_addresses(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", ".npy", 3)
    system, name = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for path in sorted(folder.iterdir()):
        system.pipe_file(f"{name}/{path.name}", path.read_bytes())
    listed = [shard_files.shard_files(source) for source in (folder, f"file://{folder}/*.npy", f"memory:/{name}/*")]
    assert [[file.name for file in files] for files in listed] == 3 * [["part-0.npy", "part-1.npy", "part-2.npy"]]
    streams = [stream(StreamedShards(tuple(files), TOKENIZER), "causal") for files in listed]
    first, *others = [values(iter(batches), 12) for batches in streams]
    assert others == [first, first]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content, expected in (
        ("a.parquet", b"no parquet", "a.parquet: expected a parquet file"),
        ("b.jsonl", b'{"text": "one"}\n{"words": 1}\n', r"b.jsonl, byte 16: expected an object with the field 'text'"),
        ("c.jsonl", b'{"text": 7}\n', "c.jsonl, byte 0: expected a text, got 7"),
        ("d.tar", contents(".tar", TEXTS[:3])[:1600], "d.tar: expected a whole, readable file"),
        ("e.jsonl.gz", gzip.compress(b"{}")[:-9], "e.jsonl.gz: expected a whole, readable file"),
        ("f.npy", b"no array", "f.npy: expected a .npy file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=expected):
            list(ShardFile(str(tmp_path / name), len(content)).rows())
    np.save(tmp_path / "g.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"g.npy: expected integers \[tokens\], got float64 \[2, 2\]"):
        list(ShardFile(str(tmp_path / "g.npy"), 1).rows())
    (tmp_path / "h.parquet").write_bytes(contents(".parquet", TEXTS[:3]))
    with pytest.raises(DataError, match=r"h.parquet: expected a column 'body', got columns 'id', 'text'"):
        list(ShardFile(str(tmp_path / "h.parquet"), 1).rows(column="body"))
    np.save(tmp_path / "i.npy", np.array([7, 9999]))
    large = StreamedShards.open(tmp_path / "i.npy", TOKENIZER)
    with pytest.raises(DataError, match=rf"i.npy, token 1: expected ids below {WORDS + FIRST}, .*, got 9999"):
        list(large.rows(0, 0))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("nothing/*.parquet", "expected a file, a folder or a pattern that matches one, got nothing there"),
        ("unknown://bucket/part.npy", "unknown://bucket/part.npy: expected an address that fsspec opens"),
        (__file__, "test_streaming.py: expected a name that ends in .parquet"),
    ],
)
def test_addresses_of_nothing(address: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        shard_files.shard_files(address)


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("files", [2, 9])
def test_every_word_comes_once_in_an_epoch(suffix: str, files: int, tmp_path: Path) -> None:
    """With more lanes than files, and with fewer."""
    opened = StreamedShards.open(write(tmp_path / "files", suffix, files), TOKENIZER)
    training = stream(opened)
    seen: list[int] = []
    for number, batch in enumerate(training):
        epochs = {lane: place[0] for lane, place in training.state_dict()["lanes"].items()}
        if epochs[number % 4] == 0:
            seen += words(batch)
        if min(epochs.values()) > 0:
            break
    assert sorted(seen) == list(range(sum(len(text.split()) for text in TEXTS)))
    assert seen != sorted(seen)


@pytest.mark.parametrize("kind", ["nsp", "sop", "single", "electra", "causal"])
def test_ranks_have_the_batches_of_one(kind: str, shards: StreamedShards) -> None:
    expected = values(iter(stream(shards, kind)), 40)
    assert len({str(batch) for batch in expected}) > 30
    for ranks in (2, 4):
        parts = [values(iter(stream(shards, kind, rank=rank, world_size=ranks)), 40 // ranks) for rank in range(ranks)]
        assert [batch for step in zip(*parts, strict=True) for batch in step] == expected
    # The validation set has one lane, which all ranks read.
    one = values(iter(stream(shards, kind, batches_per_step=1)), 6)
    parts = [values(iter(stream(shards, kind, batches_per_step=1, rank=rank, world_size=3)), 2) for rank in range(3)]
    assert [batch for step in zip(*parts, strict=True) for batch in step] == one


def test_ranks_read_other_rows(shards: StreamedShards, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks tokenize in an epoch is the corpus once."""
    tokenized: list[str] = []

    def counted(tokenizer: Any, rows: list[Any]) -> Any:
        tokenized.extend(rows)
        return arrays_of(tokenizer, rows)

    monkeypatch.setattr("fasttfm.data.tokenizing.arrays_of", counted)
    for rank in range(4):
        part = stream(shards, rank=rank, world_size=4)
        for _ in part:
            if part.state_dict()["lanes"][rank][0] > 0:
                break
    first_epochs = tokenized[: len(TEXTS)]
    assert set(tokenized) == set(TEXTS)
    assert len(tokenized) < 2 * len(TEXTS)
    assert len(set(first_epochs)) > 0.6 * len(TEXTS)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [4, 20, 52])
def test_resuming(stop: int, workers: int, shards: StreamedShards) -> None:
    """After some steps of two ranks, four continue, and one."""
    expected = values(iter(stream(shards)), stop + 24)
    ranks = [stream(shards, rank=rank, world_size=2, workers=workers) for rank in range(2)]
    for rank, rank_stream in enumerate(ranks):
        assert values(iter(rank_stream), stop // 2) == expected[:stop][rank::2]
    state = json.loads(json.dumps(ShardStream.joined([rank_stream.state_dict() for rank_stream in ranks])))
    state["lanes"] = {int(lane): place for lane, place in state["lanes"].items()}
    assert len(json.dumps(state)) < 1000
    for size in (1, 4):
        for rank in range(size):
            continued = stream(shards, rank=rank, world_size=size)
            continued.load_state_dict(state)
            assert values(iter(continued), 24 // size) == expected[stop:][rank::size]


def test_iterating_again_continues(shards: StreamedShards) -> None:
    expected = values(iter(stream(shards)), 12)
    part = stream(shards)
    assert [*values(iter(part), 5), *values(iter(part), 7)] == expected


def test_the_validation_set_has_the_other_documents(shards: StreamedShards) -> None:
    training, validation = shards.split(0.2)
    rows = [
        {row for number in range(len(part.files)) for _, row in part.rows(number, 0)} for part in (training, validation)
    ]
    assert rows[0] | rows[1] == set(TEXTS)
    assert not rows[0] & rows[1]
    assert 0.1 < len(rows[1]) / len(TEXTS) < 0.3
    assert training.fingerprint != validation.fingerprint
    inner = training.split(0.5)
    assert {row for part in inner for number in range(5) for _, row in part.rows(number, 0)} == rows[0]


def test_other_states_are_refused(shards: StreamedShards) -> None:
    part = stream(shards, rank=1, world_size=2)
    next(iter(part))
    state = part.state_dict()
    with pytest.raises(ValueError, match=r"state\['lanes'\]: expected the lanes of this rank .*, got none for 0, 2"):
        stream(shards, world_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state\['seed'\]: expected this stream's 2, got 1"):
        stream(shards, seed=2, rank=1, world_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="a multiple of the 4 ranks, got 2"):
        stream(shards, rank=1, world_size=4).load_state_dict(state)


def test_wrong_arguments(shards: StreamedShards, tmp_path: Path) -> None:
    for options, expected in (
        ({"batches_per_step": 0}, "batches_per_step: expected 1 or more, got 0"),
        ({"window_tokens": 0}, "window_tokens: expected 1 or more, got 0"),
        ({"seed": -1}, "seed: expected a number in"),
        ({"rank": 2, "world_size": 2}, r"rank: expected one in \[0, 2\), got 2"),
        ({"workers": -1}, "workers: expected 0 or more, got -1"),
        ({"tokens_per_batch": 8}, "tokens_per_batch: expected at least max_length, 32, got 8"),
    ):
        with pytest.raises(ValueError, match=f"ShardStream: {expected}"):
            stream(shards, **options)
    with pytest.raises(ValueError, match="held_out: expected a fraction between 0 and 1, got 1"):
        shards.split(1)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": TEXTS[0]}))
    small = StreamedShards.open(tmp_path / "one.jsonl", TOKENIZER)
    with pytest.raises(ValueError, match=r"expected documents for single in each of 4 parts \(batches_per_step\), got"):
        values(iter(stream(small)), 4)
    with pytest.raises(ValueError, match="expected documents for nsp in each of 1 parts"):
        values(iter(stream(small, "nsp", batches_per_step=1)), 1)


def test_a_worker_reports_its_error(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n{}\n")
    with pytest.raises(DataError, match=r"one.jsonl, byte .*: expected an object with the field 'text'"):
        values(iter(stream(StreamedShards.open(tmp_path, TOKENIZER), workers=1, batches_per_step=1)), 1)


# ---- S3 --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server in this process that speaks S3's protocol."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=free_port())
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("texts")
    yield "s3://texts"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_a_bucket_has_the_batches_of_local_files(bucket: str, tmp_path: Path) -> None:
    system = fsspec.filesystem("s3")
    for suffix in (".parquet", ".tar", ".npy"):
        folder = write(tmp_path / suffix, suffix, 3)
        for path in sorted(folder.iterdir()):
            system.pipe_file(f"texts/{suffix}/{path.name}", path.read_bytes())
        local = StreamedShards.open(folder, TOKENIZER)
        remote = StreamedShards.open(f"{bucket}/{suffix}/part-*", TOKENIZER)
        assert remote.fingerprint == local.fingerprint
        expected = values(iter(stream(local, "causal")), 20)
        part = stream(remote, "causal", workers=1)
        assert values(iter(part), 8) == expected[:8]
        continued = stream(remote, "causal")
        continued.load_state_dict(part.state_dict())
        assert values(iter(continued), 12) == expected[8:]
