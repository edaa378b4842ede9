"""Part files of ``embed`` and ``predict``: their options, and the processes that write them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fasttfm.cli.options import device_of, precision_of

ROWS_PER_PART = 65_536
Write = Callable[[Path, Iterable[Any], int], Any]  # writes rows to a path; the last argument is the first row's number
_MODEL_FILES = (".json", ".safetensors", ".bin", ".pt", ".txt", ".model")  # those that change what a model computes


class PartJob(Protocol):
    """What a command computes. It can be pickled, so that other processes can open the model."""

    suffix: str  # of the part files
    unit: str  # what a row is, in the plural

    def settings(self) -> dict[str, Any]:
        """What the results depend on, as values of JSON."""
        ...

    def rows(self) -> Iterator[Any]:
        """The rows of the input, parsed as little as possible: most processes skip most of them."""
        ...

    def open(self) -> Write:
        """Opens the model."""
        ...


class Ranks(NamedTuple):
    """The place of this process among those of ``torchrun``."""

    rank: int
    size: int
    local: int

    @classmethod
    def of_environment(cls) -> Ranks:
        defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        return cls(*(int(os.environ.get(name, default)) for name, default in defaults.items()))


def add_part_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of part files."""
    group = parser.add_argument_group(
        "part files", "--output is a folder of part files, which all processes of torchrun write together"
    )
    group.add_argument(
        "--rows-per-part",
        type=int,
        metavar="N",
        help=f"write a part file for each N rows of the input (default: one file; under torchrun {ROWS_PER_PART})",
    )


def is_in_parts(arguments: argparse.Namespace) -> bool:
    """Whether the command writes part files."""
    return arguments.rows_per_part is not None or Ranks.of_environment().size > 1


def prepare_parts(arguments: argparse.Namespace) -> None:
    """Sets the number of rows of a part, the device of this process and the precision that all processes have. Raises
    ValueError for options that part files do not have."""
    if arguments.rows_per_part is None:
        arguments.rows_per_part = ROWS_PER_PART
    if arguments.overwrite:
        raise ValueError("--overwrite: expected without part files, of which only missing ones are written")
    if arguments.output is None:
        raise ValueError("--output: expected a folder for part files, got none")
    sources = _sources(arguments)
    if not sources or "-" in sources:
        raise ValueError(f"--data: expected files, which every process can read, got {'stdin' if sources else 'none'}")
    output = arguments.output.resolve()
    for name, path in (("model", arguments.model), *(("data", source) for source in sources)):
        if output.is_relative_to(Path(path).resolve()):
            raise ValueError(f"--output: expected a folder outside of --{name}, got {arguments.output}")
    ranks, device = Ranks.of_environment(), device_of(arguments)
    if ranks.size > 1 and device.type == "cuda" and device.index is None:
        arguments.device = f"cuda:{ranks.local}"
        device = device_of(arguments)  # raises ValueError for more processes than GPUs
    arguments.precision = precision_of(arguments, device)


def run_in_parts(arguments: argparse.Namespace, job: PartJob) -> int:
    """Writes the missing part files of this process: rank r of R has the parts r, r + R, ..."""
    from fasttfm.data.lines import DataError
    from fasttfm.inference.part_files import PartFolder, Parts

    ranks = Ranks.of_environment()
    folder = PartFolder(arguments.output, job.suffix, {**job.settings(), "rows per part": arguments.rows_per_part})
    parts = Parts(job.rows(), arguments.rows_per_part)
    write: Write | None = None
    count = 0
    for number, rows in parts.chosen(lambda number: number % ranks.size == ranks.rank and not folder.has(number)):
        write = write or job.open()
        folder.write(number, _writer(write, rows, number * arguments.rows_per_part))
        count += 1
        if not arguments.quiet and ranks.rank == 0:
            print(f"{folder.path(number).name} is written", flush=True)
    if not parts.totals.rows:
        raise DataError(f"--data: expected {job.unit}, got none")
    is_complete = folder.finish(parts.totals)
    where = f"{arguments.output}: rank {ranks.rank} of {ranks.size}" if ranks.size > 1 else f"{arguments.output}"
    print(f"{where}: {count:,} of {parts.totals.parts:,} parts written")
    if is_complete:
        print(f"{arguments.output}: complete, {parts.totals.rows:,} {job.unit}")
    return 0


def _writer(write: Write, rows: Iterable[Any], first_row: int) -> Callable[[Path], Any]:
    return lambda path: write(path, rows, first_row)


def settings_of(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The values of options, and the fingerprints of the model, its tokenizer and the input."""
    from fasttfm.data.texts import files_of
    from fasttfm.inference.opening import checkpoint_of
    from fasttfm.inference.part_files import fingerprint
    from fasttfm.models.directories import MODULES
    from fasttfm.models.hub import model_directory

    folder = model_directory(arguments.model)
    if not (folder / MODULES).is_file():  # otherwise of sentence-transformers, with a folder for each module
        folder = checkpoint_of(arguments.model)
    files = [path for source in _sources(arguments) for path in files_of(source) or []]
    settings = {
        "command": arguments.command,
        "model": fingerprint(_files_below([folder], _MODEL_FILES), folder),
        "input": fingerprint(_files_below(files)),
    }
    for name in ("tokenizer", "calibration"):
        path = getattr(arguments, name, None)
        settings[name] = None if path is None else fingerprint(_files_below([Path(path)]))
    return settings | {name.replace("_", " "): getattr(arguments, name) for name in names}


def _sources(arguments: argparse.Namespace) -> list[str]:
    return [arguments.data] if isinstance(arguments.data, str) else list(arguments.data or [])


def _files_below(paths: Iterable[Path], suffixes: tuple[str, ...] = ("",)) -> Iterator[Path]:
    """The files themselves, and those in and below folders whose names end in one of ``suffixes``."""
    for path in paths:
        if path.is_dir():
            yield from sorted(each for each in path.rglob("*") if each.is_file() and each.name.endswith(suffixes))
        else:
            yield path
