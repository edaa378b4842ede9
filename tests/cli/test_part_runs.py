"""``fasttfm embed`` and ``predict`` in part files: the vectors of one file, the ranks of torchrun, and processes that
are killed at any moment."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm.cli.main import main
from fasttfm.data.task_files import TextExample
from fasttfm.inference.part_files import COMPLETE, UNFINISHED
from fasttfm.tasks.finetuning import prepare, save

parquet = pytest.importorskip("pyarrow.parquet", reason="it reads part files")
TEXTS = [f"{number} ships and {number % 7} nations" + " of the north" * (number % 5) for number in range(23)]


def embed(model: Path, data: Path, output: Path, *options: Any) -> int:
    call = ("embed", "--model", model, "--data", data, "--output", output, "--device", "cpu", "--quiet", *options)
    return main([str(argument) for argument in call])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("part-*.parquet")) for row in parquet.read_table(path).to_pylist()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture(scope="module")
def classifier(bert_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    examples = [TextExample("peace", None, "a"), TextExample("war", None, "b")]
    torch.manual_seed(0)
    save(*prepare("classify", bert_directory, examples, max_length=48), folder)
    return folder


def write_forms(folder: Path) -> dict[str, Path]:
    """The same texts in files of several formats."""
    import pyarrow

    paths = {name: folder / f"input.{name}" for name in ("jsonl", "csv", "parquet")}
    paths["jsonl"].write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS))
    with paths["csv"].open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in TEXTS)])
    parquet.write_table(pyarrow.table({"text": TEXTS}), paths["parquet"])
    return paths


def test_parts_are_the_file(bert_directory: Path, texts: Path, tmp_path: Path) -> None:
    assert embed(bert_directory, texts, tmp_path / "whole.npy") == 0
    expected = np.load(tmp_path / "whole.npy")
    for name, path in {"txt": texts, **write_forms(tmp_path)}.items():
        assert embed(bert_directory, path, tmp_path / name, "--rows-per-part", "5") == 0
        rows = rows_of(tmp_path / name)
        assert [row["text"] for row in rows] == TEXTS
        assert [row["row"] for row in rows] == list(range(len(TEXTS)))
        assert np.allclose([row["vector"] for row in rows], expected, atol=1e-5)
        assert len(list((tmp_path / name).glob("part-*"))) == 5
    assert embed(bert_directory, texts, tmp_path / "whole.parquet") == 0
    whole = parquet.read_table(tmp_path / "whole.parquet").to_pydict()
    assert whole["text"] == TEXTS
    assert np.array_equal(np.array(whole["vector"], np.float32), expected)


@pytest.mark.parametrize("options", [("--tokens",), ("--tokens", "--format", "npz"), ("--dtype", "float16")])
def test_other_results_in_parts(options: tuple[str, ...], bert_directory: Path, texts: Path, tmp_path: Path) -> None:
    assert embed(bert_directory, texts, tmp_path / "parts", "--rows-per-part", "12", *options) == 0
    if "npz" in options:
        offsets = [np.load(path)["offsets"] for path in sorted((tmp_path / "parts").glob("*.npz"))]
        assert [len(bounds) - 1 for bounds in offsets] == [12, 11]
        return
    rows = rows_of(tmp_path / "parts")
    assert len(rows) == len(TEXTS)
    if "--tokens" in options:
        assert all(np.shape(row["vectors"]) == (len(row["ids"]), 64) for row in rows)
    else:
        (first, *_) = (tmp_path / "parts").glob("part-000000*")
        assert str(parquet.read_schema(first).field("vector").type) == "fixed_size_list<element: halffloat>[64]"


def test_ranks_share_out_the_parts(
    bert_directory: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, parts in ((1, ["000001", "000003"]), (0, ["000000", "000001", "000002", "000003", "000004"])):
        monkeypatch.setenv("RANK", str(rank))
        assert embed(bert_directory, texts, tmp_path / "parts", "--rows-per-part", "5") == 0
        names = sorted(path.name for path in (tmp_path / "parts").glob("part-*"))
        assert names == [f"part-{number}.parquet" for number in parts]
        assert (tmp_path / "parts" / COMPLETE).exists() == (rank == 0)
    assert [row["text"] for row in rows_of(tmp_path / "parts")] == TEXTS


@pytest.mark.parametrize(
    "options",
    [
        ("--pooling", "first"),
        ("--dtype", "float16", "--format", "npy"),
        ("--chunks", "4", "--format", "npz"),
        ("--tokens", "--format", "safetensors"),
        ("--sparse",),
    ],
)
def test_a_search_in_parts_is_that_in_one_file(
    options: tuple[str, ...], bert_directory: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = options[-1] if "--format" in options else "npz" if "--sparse" in options else "parquet"
    form = [option for option in options if option not in ("--format", suffix)]
    whole, queries, parts = tmp_path / f"whole.{suffix}", tmp_path / f"queries.{suffix}", tmp_path / "parts"
    (tmp_path / "queries.txt").write_text(f"{TEXTS[17]}\n{TEXTS[3]}\n")
    assert embed(bert_directory, texts, whole, *form) == 0
    assert embed(bert_directory, tmp_path / "queries.txt", queries, *form) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert embed(bert_directory, texts, parts, "--rows-per-part", "5", *options) == 0
    call = ["search", "--texts", str(texts), "--quiet", "--query-vectors", str(queries), "--vectors"]
    if suffix in ("parquet", "npz") and "--chunks" not in options:  # by texts; the manifest has the pooling
        model = ("--model", str(bert_directory), "--device", "cpu", "--query", TEXTS[17], "--query", TEXTS[3])
        call = ["search", "--quiet", *model, "--vectors"]
    found = {}
    for path in (whole, parts):
        output = tmp_path / f"{path.stem}-matches.jsonl"
        pooling = ("--pooling", "first") if "first" in options and path is whole else ()
        assert main([*call, str(path), "--output", str(output), "--top", "7", *pooling]) == 0
        found[path] = [json.loads(line)["matches"] for line in output.read_text().splitlines()]
    for row, in_parts in zip(found[whole], found[parts], strict=True):
        scores = [match["score"] for match in row]
        assert [match["score"] for match in in_parts] == pytest.approx(scores, rel=1e-4)
        assert in_parts[0]["index"] in [match["index"] for match in row if match["score"] > scores[0] - 1e-3]
        assert len({match["index"] for match in in_parts}) == 7
        assert all(match["text"] in (TEXTS[match["index"]], None) for match in in_parts)


def test_folders_that_cannot_be_searched(
    bert_directory: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path, *options: str) -> str:
        call = ["search", "--vectors", str(folder), "--model", str(bert_directory), "--query", "peace", *options]
        with pytest.raises(SystemExit):
            main(call)
        return capsys.readouterr().err

    parts = tmp_path / "parts"
    assert f"{tmp_path}: expected a folder of part files, with _manifest.json, got none" in refused(tmp_path)
    assert embed(bert_directory, texts, parts, "--rows-per-part", "5") == 0
    index = ("--index", str(tmp_path / "index"))
    assert "expected a file of one vector for each text, got a folder of part files" in refused(parts, *index)
    (parts / "part-000003.parquet").unlink()
    assert "expected 5 parts, got 4 of them" in refused(parts)
    (parts / COMPLETE).unlink()
    assert "expected all parts of a run that has ended, with _complete.json, got none" in refused(parts)


def test_another_run_is_refused(
    bert_directory: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = tmp_path / "parts"
    assert embed(bert_directory, texts, parts, "--rows-per-part", "5") == 0
    for options, message in (
        (("--pooling", "first"), "expected pooling None, with which"),
        (("--dimensions", "8"), "expected dimensions None"),
        (("--rows-per-part", "6"), "expected rows per part 5"),
        (("--format", "npy"), "expected suffix '.parquet'"),
    ):
        with pytest.raises(SystemExit):
            embed(bert_directory, texts, parts, "--rows-per-part", "5", *options)
        assert message in capsys.readouterr().err
    texts.write_text(texts.read_text().replace("ships", "boats"))
    with pytest.raises(SystemExit):
        embed(bert_directory, texts, parts, "--rows-per-part", "5")
    assert "expected input {'files': 1," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "-"), "--data: expected files"),
        (("--overwrite",), "--overwrite: expected without part files"),
        (("--rows-per-part", "0"), "--rows-per-part: expected a number from 1 on"),
        (("--dtype", "int8", "--format", "npz"), "int8: expected --calibration"),
        (("--dtype", "int8"), "expected a file that ends in .npz, .safetensors"),
        (("--chunks", "4"), "--chunks: expected --format of a file that ends in .npz or .safetensors, got .parquet"),
    ],
)
def test_what_part_files_do_not_have(
    options: tuple[str, ...],
    message: str,
    bert_directory: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        embed(bert_directory, texts, tmp_path / "parts", "--rows-per-part", "5", *options)
    assert message in capsys.readouterr().err


def test_a_broken_line_is_named_and_its_part_is_missing(
    bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": 3}\n')
    with pytest.raises(SystemExit):
        embed(bert_directory, path, tmp_path / "parts", "--rows-per-part", "2")
    assert "broken.jsonl, line 3: expected a text in 'text', got {\"text\": 3}" in capsys.readouterr().err
    assert [row["text"] for row in rows_of(tmp_path / "parts")] == ["one", "two"]


def test_predictions_in_parts(classifier: Path, texts: Path, tmp_path: Path) -> None:
    call = ["predict", "--model", classifier, "--device", "cpu", "--quiet"]
    whole, paths = tmp_path / "whole.jsonl", {"txt": texts, **write_forms(tmp_path)}
    assert main([str(argument) for argument in (*call, "--data", texts, "--output", whole)]) == 0
    expected = [json.loads(line) for line in whole.read_text().splitlines()]
    for name in paths:
        options = ("--data", paths[name], "--output", tmp_path / name, "--rows-per-part", "10")
        assert main([str(argument) for argument in (*call, *options)]) == 0
        parts = sorted((tmp_path / name).glob("part-*.jsonl"))
        rows = [json.loads(line) for path in parts for line in path.read_text().splitlines()]
        assert [row["text"] for row in rows] == TEXTS
        assert [row["label"] for row in rows] == [row["label"] for row in expected]
    options = ("--data", texts, "--output", tmp_path / "table", "--rows-per-part", "10", "--format", "parquet")
    assert main([str(argument) for argument in (*call, *options)]) == 0
    table = rows_of(tmp_path / "table")
    assert [row["row"] for row in table] == list(range(len(TEXTS)))
    assert [row["label"] for row in table] == [row["label"] for row in expected]


def start(ranks: int, *arguments: Any) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    call = [*launcher, "-m", "fasttfm", "embed", *map(str, arguments)]
    return subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the ranks of a launcher are read from Linux's /proc")
def test_killed_ranks_and_a_killed_launcher_lose_and_double_nothing(bert_directory: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "texts.txt", tmp_path / "parts"
    expected = [f"{number} {TEXTS[number % 23]}" for number in range(3000)]
    data.write_text("\n".join(expected) + "\n")
    arguments = (
        "--model",
        bert_directory,
        "--data",
        data,
        "--output",
        output,
        "--device",
        "cpu",
        "--rows-per-part",
        10,
    )
    for victim in ("rank", "launcher"):  # the ranks of a killed launcher write their parts next to the following run
        process, count = start(2, *arguments), len(list(output.glob("part-*")))
        while len(list(output.glob("part-*"))) < count + 5:
            assert process.poll() is None
            time.sleep(0.001)
        os.kill(children(process.pid)[0] if victim == "rank" else process.pid, signal.SIGKILL)
        assert process.wait(timeout=120) != 0
        assert not (output / COMPLETE).exists()
    assert start(1, *arguments).wait(timeout=300) == 0
    rows = rows_of(output)
    assert [row["row"] for row in rows] == list(range(3000))
    assert [row["text"] for row in rows] == expected
    assert (output / COMPLETE).exists()
    assert not (output / UNFINISHED).exists()
