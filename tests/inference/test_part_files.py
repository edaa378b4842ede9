"""Part files: every row once, however processes are killed; other settings are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fasttfm.inference.part_files import COMPLETE, MANIFEST, UNFINISHED, PartFolder, Parts, Totals, fingerprint


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def write_all(folder: PartFolder, rows: range, size: int, rank: int = 0, ranks: int = 1) -> list[int]:
    """What a rank does. Returns the numbers of the parts that it has written."""
    parts, written = Parts(rows, size), []
    for number, part in parts.chosen(lambda number: number % ranks == rank and not folder.has(number)):
        folder.write(number, lambda path, part=part: path.write_text("\n".join(map(str, part))))
        written.append(number)
    folder.finish(parts.totals)
    return written


@pytest.mark.parametrize(("count", "size"), [(10, 4), (8, 4), (1, 4), (4, 4), (7, 1)])
def test_ranks_write_every_row_once(count: int, size: int, tmp_path: Path) -> None:
    for rank in range(3):
        assert not (tmp_path / COMPLETE).exists() or rank * size >= count
        write_all(PartFolder(tmp_path, ".txt", {}), range(count), size, rank, 3)
    paths = sorted(tmp_path.glob("part-*"))
    assert [row for path in paths for row in lines(path)] == list(range(count))
    assert all(len(lines(path)) == size for path in paths[:-1])
    assert json.loads((tmp_path / COMPLETE).read_text()) == {"parts": len(paths), "rows": count}


def test_a_rerun_on_other_ranks_writes_only_missing_parts(tmp_path: Path) -> None:
    folder = PartFolder(tmp_path, ".txt", {})
    assert write_all(folder, range(20), 3, rank=1, ranks=2) == [1, 3, 5]
    before = folder.path(3).stat().st_mtime_ns
    assert write_all(PartFolder(tmp_path, ".txt", {}), range(20), 3) == [0, 2, 4, 6]
    assert folder.path(3).stat().st_mtime_ns == before
    assert write_all(folder, range(20), 3) == []


def test_a_part_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = PartFolder(tmp_path, ".txt", {})

    def fail(path: Path) -> None:
        path.write_text("half of")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        folder.write(0, fail)
    assert folder.numbers() == []
    assert list((tmp_path / UNFINISHED).iterdir()) == []


def test_files_of_killed_processes_are_removed_at_the_end(tmp_path: Path) -> None:
    folder = PartFolder(tmp_path, ".txt", {})
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / UNFINISHED / "0123-part-000000.txt").write_text("half of")
    assert not folder.finish(Totals(1, 1))
    assert (tmp_path / UNFINISHED).exists()
    assert write_all(folder, range(4), 4) == [0]
    assert sorted(os.listdir(tmp_path)) == [COMPLETE, MANIFEST, "part-000000.txt"]


def test_two_processes_that_write_the_same_part_have_files_of_their_own(tmp_path: Path) -> None:
    first, second = (PartFolder(tmp_path, ".txt", {}) for _ in range(2))

    def write(path: Path) -> None:
        second.write(0, lambda other: other.write_text("1 2"))
        path.write_text("1 2")

    first.write(0, write)
    assert lines(first.path(0)) == [1, 2]


def test_other_settings_are_refused_in_words(tmp_path: Path) -> None:
    PartFolder(tmp_path, ".txt", {"pooling": "mean", "sizes": (1, 2)})
    PartFolder(tmp_path, ".txt", {"pooling": "mean", "sizes": [1, 2]})
    with pytest.raises(ValueError, match=r"expected pooling 'mean', with which .* was begun, got 'first'"):
        PartFolder(tmp_path, ".txt", {"pooling": "first", "sizes": (1, 2)})
    with pytest.raises(ValueError, match=r"expected suffix '\.txt'"):
        PartFolder(tmp_path, ".csv", {"pooling": "mean", "sizes": (1, 2)})


def test_folders_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"expected a new or empty folder, .* with thesis\.txt"):
        PartFolder(tmp_path, ".txt", {})
    with pytest.raises(ValueError, match="expected a folder, got the file"):
        PartFolder(tmp_path / "thesis.txt", ".txt", {})
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_parts_are_read_lazily() -> None:
    read = []
    parts = Parts((read.append(row) or row for row in range(100)), 10)
    number, rows = next(parts.chosen(lambda number: number == 2))
    assert (number, next(rows)) == (2, 20)
    assert read == list(range(21))
    with pytest.raises(ValueError, match="--rows-per-part: expected a number from 1 on, got 0"):
        Parts(range(3), 0)


def test_fingerprints_follow_names_and_contents(tmp_path: Path) -> None:
    path, large = tmp_path / "a.txt", tmp_path / "large.bin"
    path.write_text("one")
    large.write_bytes(bytes(3 << 20))
    before = fingerprint([path, large])
    assert (before["files"], before["bytes"]) == (2, 3 + (3 << 20))
    os.utime(path, (0, 0))
    assert fingerprint([path, large]) == before
    path.write_text("two")
    assert fingerprint([path, large])["sha256"] != before["sha256"]
    path.write_text("one")
    with large.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    assert fingerprint([path, large])["sha256"] != before["sha256"]
    assert fingerprint([large, path]) != fingerprint([path, large])
