"""Part files of ``embed`` and ``predict``: their options, and the processes that write them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fasttfm.cli.options import device_of, precision_of
from fasttfm.inference.part_files import PartFolder, Parts, fingerprint

ROWS_PER_PART = 65_536
Write = Callable[[Path, Iterable[Any], int], Any]  # writes rows to a path; the last argument is the first row's number
Missing = Iterator[tuple[int, Iterator[Any]]]  # the numbers and rows of parts that are not written
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
        help="write a part file for each N rows of the input (default: one file; with several processes "
        f"{ROWS_PER_PART})",
    )
    group.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: this process, or those of torchrun; ray: workers of a Ray cluster",
    )
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="ray: the cluster, or auto for that of this machine (default: RAY_ADDRESS, or a cluster that is started)",
    )
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="ray: number of workers (default: one for each GPU of the cluster, or for each --cpus-per-worker cores)",
    )
    group.add_argument(
        "--cpus-per-worker", type=int, default=1, metavar="N", help="ray: CPU cores, and threads, of a worker"
    )


def is_in_parts(arguments: argparse.Namespace) -> bool:
    """Whether the command writes part files."""
    is_shared = arguments.engine == "ray" or Ranks.of_environment().size > 1
    return is_shared or arguments.rows_per_part is not None


def _prepare(arguments: argparse.Namespace) -> None:
    """Sets the number of rows of a part, the device of this process and the precision that all processes have. Raises
    ValueError for options that part files do not have."""
    if arguments.rows_per_part is None:
        arguments.rows_per_part = ROWS_PER_PART
    if arguments.overwrite:
        raise ValueError("--overwrite: expected without part files, of which only missing ones are written")
    if arguments.output is None:
        raise ValueError("--output: expected a folder for part files, got none")
    if arguments.precision == "auto":
        raise ValueError("--precision: auto: expected one that all processes have, with part files")
    sources = _sources(arguments)
    if not sources or "-" in sources:
        raise ValueError(f"--data: expected files, which every process can read, got {'stdin' if sources else 'none'}")
    output = arguments.output.resolve()
    for name, path in (("model", arguments.model), *(("data", source) for source in sources)):
        if output.is_relative_to(Path(path).resolve()):
            raise ValueError(f"--output: expected a folder outside of --{name}, got {arguments.output}")
    if arguments.engine == "ray":
        _prepare_ray(arguments)
        return
    ranks, device = Ranks.of_environment(), device_of(arguments)
    if ranks.size > 1 and device.type == "cuda" and device.index is None:
        arguments.device = f"cuda:{ranks.local}"
        device = device_of(arguments)  # raises ValueError for more processes than GPUs
    arguments.precision = precision_of(arguments, device)


def run_in_parts(arguments: argparse.Namespace, job_of: Callable[[argparse.Namespace], PartJob]) -> int:
    """Writes the missing part files of this process: rank r of R has the parts r, r + R, ... With Ray, all of them."""
    try:
        _prepare(arguments)
        _write_missing(arguments, job_of(arguments))
    finally:
        if arguments.engine == "ray":
            from fasttfm.inference.ray import disconnect

            disconnect()
    return 0


def _write_missing(arguments: argparse.Namespace, job: PartJob) -> None:
    from fasttfm.data.lines import DataError

    ranks = Ranks.of_environment()
    settings = {**job.settings(), "rows per part": arguments.rows_per_part}
    folder = PartFolder(arguments.output.resolve(), job.suffix, settings)
    parts = Parts(job.rows(), arguments.rows_per_part)
    missing = parts.chosen(lambda number: number % ranks.size == ranks.rank and not folder.has(number))
    run = _run_on_ray if arguments.engine == "ray" else _run_here
    count = 0
    for number in run(arguments, job, folder, missing):
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


def _run_here(arguments: argparse.Namespace, job: PartJob, folder: PartFolder, missing: Missing) -> Iterator[int]:
    write: PartWriter | None = None
    for number, rows in missing:
        write = write or PartWriter(job.open(), folder, arguments.rows_per_part)
        yield write(number, rows)


# ---- Ray -------------------------------------------------------------------------------------------------------------


def _prepare_ray(arguments: argparse.Namespace) -> None:
    """Connects to the cluster, and chooses the workers and their precision. Workers have other current directories."""
    from fasttfm.inference import ray

    if Ranks.of_environment().size > 1:
        raise ValueError("--engine: ray: expected one process, got several of torchrun")
    for name, least in (("workers", 1), ("cpus_per_worker", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')}: expected a number from {least} on, got {value}")
    if arguments.device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda with --engine ray, got {arguments.device}")
    for name in ("model", "tokenizer", "calibration", "adapter"):
        value = getattr(arguments, name, None)
        if value is not None and Path(value).exists():
            setattr(arguments, name, str(Path(value).resolve()))
    resources = ray.connect(arguments.address)
    gpus = 0 if arguments.device == "cpu" else int(resources.get("GPU", 0))
    if arguments.device == "cuda" and not gpus:
        raise ValueError("--device: cuda: expected a Ray cluster with GPUs, got none")
    arguments.precision = arguments.precision or ("bfloat16" if gpus else "float32")
    arguments.uses_gpus = gpus > 0
    if arguments.workers is None:
        arguments.workers = gpus or max(1, int(resources.get("CPU", 1)) // arguments.cpus_per_worker)


def _run_on_ray(arguments: argparse.Namespace, job: PartJob, folder: PartFolder, missing: Missing) -> Iterator[int]:
    from fasttfm.inference import ray

    workers = ray.Workers(arguments.workers, arguments.cpus_per_worker, int(arguments.uses_gpus))
    tasks = ((number, list(rows)) for number, rows in missing)
    yield from ray.run_tasks(_OpenedThere(job, folder, arguments.rows_per_part), tasks, workers)


@dataclass
class _OpenedThere:
    """Opens the model in a worker."""

    job: PartJob
    folder: PartFolder
    size: int

    def __call__(self) -> PartWriter:
        return PartWriter(self.job.open(), self.folder, self.size)


@dataclass
class PartWriter:
    """Writes the part with a number and returns the number."""

    write: Write
    folder: PartFolder
    size: int

    def __call__(self, number: int, rows: Iterable[Any]) -> int:
        self.folder.write(number, lambda path: self.write(path, rows, number * self.size))
        return number


# ---- settings --------------------------------------------------------------------------------------------------------


def settings_of(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The values of options, and the fingerprints of the model, its tokenizer and the input."""
    from fasttfm.data.texts import files_of
    from fasttfm.inference.opening import checkpoint_of
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
            yield from sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(suffixes))
        else:
            yield path
