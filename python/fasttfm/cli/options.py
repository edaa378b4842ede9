"""Options, error messages and output files that the commands share."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# The help of every option that takes a model; its metavar is MODEL.
MODEL_HELP = (
    "directory of a training run, of one of its checkpoints, or of a model of transformers or sentence-transformers; "
    "or a hub id such as bert-base-uncased"
)
GPT_HELP = f"GPT: {MODEL_HELP}".replace("bert-base-uncased", "gpt2")


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows a command's docstring as its description, with its line breaks, and the defaults of options."""

    def _format_text(self, text: str) -> str:
        begun, sign, rest = text.partition("``: ")  # the docstring of a module begins with the command's name
        return super()._format_text(rest[:1].upper() + rest[1:] if sign and begun.startswith("``fasttfm") else text)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = not (action.default is None or action.default is False or action.default in ("", (), []))
        if shown and isinstance(action.default, tuple):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action) if shown else action.help


def add_device_option(parser: Any) -> None:
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (default: a GPU if there is one)")


def add_training_options(parser: argparse.ArgumentParser, *, rate: float | None, about_rate: str) -> Any:
    """Adds the training options that all commands share. Returns their group, so that a command can add more."""
    group = parser.add_argument_group("training")
    group.add_argument("--learning-rate", type=float, default=rate, metavar="RATE", help=about_rate)
    group.add_argument(
        "--warmup-share", type=float, default=0.1, metavar="FRACTION", help="fraction of the steps for warmup"
    )
    group.add_argument(
        "--weight-decay",
        type=float,
        default=0.01,
        metavar="RATE",
        help="weight decay, except for biases and LayerNorms",
    )
    group.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="max gradient norm; 0 disables clipping")
    group.add_argument("--accumulation", type=int, default=1, metavar="N", help="gradient accumulation steps")
    group.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "fp8"),
        help="compute precision; fp8: the layers' GEMMs train in FP8 (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    return group


def add_run_options(parser: argparse.ArgumentParser) -> Any:
    """Adds the options for output and device. Returns their group."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--output", type=Path, metavar="DIR", help="output directory (default: a new one under fasttfm-runs)"
    )
    group.add_argument("--overwrite", action="store_true", help="write to --output even if it has files")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    add_device_option(group)
    return group


def add_column_options(group: Any) -> None:
    """Adds the options of files with columns; ``columns_of`` reads them."""
    about = "by name or number (default: the column with a usual name)"
    for name, what in (("text", "text"), ("pair", "second text of a pair"), ("label", "label")):
        group.add_argument(f"--{name}-column", metavar="NAME", help=f"column of the {what}, {about}")
    group.add_argument(
        "--no-header",
        action="store_true",
        help="csv and tsv files have no header line; columns are text and label, or two texts and label, or are "
        "numbered from 1",
    )


def columns_of(arguments: argparse.Namespace) -> Any:
    """The columns that ``add_column_options`` names."""
    from fasttfm.data.task_files import Columns

    names = (arguments.text_column, arguments.pair_column, arguments.label_column)
    return Columns(*names, header=not arguments.no_header)


def add_trial_options(group: Any) -> None:
    """Adds the options for several trainings, of which the best is kept; ``tasks.trials.plan`` reads them."""
    group.add_argument(
        "--search", type=_rates, metavar="A,B,...", help="train with each of these learning rates and keep the best"
    )
    group.add_argument(
        "--restarts",
        type=int,
        default=1,
        metavar="N",
        help="train with N seeds, keep the best, and report mean and standard deviation",
    )


def _rates(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected learning rates with commas between them, got {text!r}") from None


def check_trials(arguments: argparse.Namespace) -> None:
    if arguments.search is not None and arguments.learning_rate is not None:
        raise ValueError("--search: expected without --learning-rate")


def check_epochs(epochs: int | None) -> None:
    if epochs is not None and epochs < 1:
        raise ValueError(f"--epochs: expected a number from 1 on, got {epochs}")


def settings_of(arguments: argparse.Namespace, device: Any, rate: float, **changes: Any) -> Any:
    """The settings of a run: those of ``add_training_options`` with this learning rate, and ``changes``."""
    from fasttfm.tasks.finetuning import FinetuneSettings
    from fasttfm.tasks.rates import Rates
    from fasttfm.train import StepSettings

    rates = {"weight_decay": arguments.weight_decay, **changes.pop("rates", {})}
    return FinetuneSettings(
        rates=Rates(rate, **rates),
        accumulation=arguments.accumulation,
        warmup=arguments.warmup_share,
        step=StepSettings(clip=arguments.clip or None, precision=precision_of(arguments, device)),
        **{"seed": arguments.seed, **changes},
    )


def check_output(arguments: argparse.Namespace, **sources: Any) -> None:
    """Raises ValueError if ``--output`` is one of the directories that the command reads, or has files and there is no
    ``--overwrite``.

    Args:
        sources: Directories or files that are read, by their options' names; None for those that are not given.
    """
    output: Path | None = arguments.output
    if output is None or not output.exists():
        return
    if not output.is_dir():
        raise ValueError(f"--output: expected a directory, got the file {output}")
    for name, source in sources.items():
        if source is not None and Path(source).exists() and output.samefile(source):
            raise ValueError(f"--output: expected another directory than --{name}, got {output}")
    names = sorted(path.name for path in output.iterdir() if path.name != ".lock")  # of a run that has ended
    if names and not arguments.overwrite:
        got = f"{output} with {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        raise ValueError(f"--output: expected a new or empty directory, got {got}; --overwrite writes to it")


def check_resumed_output(arguments: argparse.Namespace, **sources: Any) -> None:
    """``check_output`` for commands with ``--resume``, whose run must be in ``--output``."""
    if not arguments.resume:
        check_output(arguments, **sources)
    elif arguments.output is None:
        raise ValueError("--resume: expected --output, the directory of the run to resume")
    elif arguments.overwrite:
        raise ValueError("--resume: expected without --overwrite, which starts a new run")


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that a resumed run must share with the run that it continues."""
    others = {"command", "refuse", "output", "overwrite", "resume", "checkpoint_every", "quiet", "device"}
    return {name: value for name, value in vars(arguments).items() if name not in others}


def check_output_file(arguments: argparse.Namespace) -> None:
    """Raises ValueError if the file ``--output`` is the model's or that of the data, or exists and there is no
    ``--overwrite``, and OSError if it cannot be written. Makes its directory."""
    output: Path | None = arguments.output
    if output is None:
        return
    if output.is_dir():
        raise ValueError(f"--output: expected a file, got the directory {output}")
    if output.exists() and output.resolve().parent == Path(os.path.realpath(arguments.model)):
        raise ValueError(f"--output: expected a file that is not the model's, got {output}")
    read = [arguments.data] if isinstance(arguments.data, (str, Path)) else arguments.data or []
    if output.exists() and any(Path(path).exists() and output.samefile(path) for path in read):
        raise ValueError(f"--output: expected another file than --data, got {output}")
    check_new_file(output, overwrite=arguments.overwrite)


def check_new_file(output: Path, *, overwrite: bool) -> None:
    """Raises ValueError if the file exists and is not to be replaced, and OSError if it cannot be written. Makes its
    directory."""
    if output.exists() and not overwrite:
        raise ValueError(f"--output: expected a new file, got {output}, which exists; --overwrite replaces it")
    check_writable(output.parent)


def check_writable(directory: Path) -> None:
    """Makes the directory; raises OSError if no file can be written there."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        expected = f"expected a directory that can be written to, got {error.strerror}"
        raise OSError(error.errno, expected, str(directory)) from None


def output_of(arguments: argparse.Namespace, name: str) -> Path:
    """The directory ``--output`` (after ``check_output``), or a new one."""
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        return Path(arguments.output)
    while True:
        directory = new_directory(name)
        with contextlib.suppress(FileExistsError):  # another process was quicker
            directory.mkdir(parents=True)
            return directory


def new_directory(name: str) -> Path:
    """The first number under fasttfm-runs that is free."""
    numbered = (Path("fasttfm-runs") / f"{name}-{number}" for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


def device_of(arguments: argparse.Namespace) -> Any:
    from fasttfm.train.distributed import device_named

    return device_named(arguments.device)


def precision_of(arguments: argparse.Namespace, device: Any) -> str:
    return arguments.precision or ("bfloat16" if device.type == "cuda" else "float32")


def note_precision(arguments: argparse.Namespace, session: Any) -> None:
    """Prints which precision a session has chosen, and why."""
    if session.reason is not None and not arguments.quiet:
        name = session.precision or str(session.dtype).removeprefix("torch.")
        print(f"note: precision {name}: {session.reason}", file=sys.stderr)


@contextlib.contextmanager
def exit_on_user_error(arguments: argparse.Namespace) -> Iterator[None]:
    """Wraps a command's work: a wrong argument exits with a message and status 2; data, a checkpoint, a directory or a
    package that cannot be used exits with a message and status 1. Warnings become lines on stderr."""
    from fasttfm.data.lines import DataError
    from fasttfm.models import CheckpointError
    from fasttfm.train import NonFiniteError
    from fasttfm.train.pretrain import RunError

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"note: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = note
        try:
            yield
        except BrokenPipeError:  # the reader of stdout is gone; main handles it
            raise
        except (DataError, CheckpointError, NonFiniteError, RunError, ImportError, OSError) as error:
            print(f"fasttfm {arguments.command}: {in_words(error)}", file=sys.stderr)
            raise SystemExit(1) from None
        except ValueError as error:
            arguments.refuse(str(error))


def in_words(error: BaseException) -> str:
    """An error's sentence; of the system's errors the file and the reason, without their number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def draw_curves(log: Path, title: str) -> None:
    """Plots a log's curves into its directory. A failure does not end the run: without matplotlib it prints a note."""
    from fasttfm.train.curves import CURVES, write_curves

    try:
        write_curves(log, log.with_name(CURVES), title)
    except (ImportError, OSError) as error:
        print(f"note: {error}", file=sys.stderr)


def sentence(scores: Mapping[str, float]) -> str:
    """Scores on one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in scores.items())


def domain_table(name: str, domains: Mapping[str, Mapping[str, float]]) -> str:
    """The scores of each domain as a table: a line for each, numbers in columns."""
    names = list(next(iter(domains.values())))
    rows = [[f"{name}, by domain", *names]]
    for domain, scores in domains.items():
        rows.append(
            [domain, *(f"{value:,}" if isinstance(value, int) else f"{value:.3f}" for value in scores.values())]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def whole_numbers(value: str) -> tuple[int, ...]:
    """The type of options with numbers such as 256,128,64."""
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 256,128,64, got {value!r}") from None
