"""``fasttfm predict``: runs a fine-tuned model, or the head of a pre-trained one, on new examples.

  fasttfm predict --model DIR --data reviews.txt --output predictions.csv
  fasttfm predict --model DIR --data dev-v2.0.json --output answers.jsonl
  echo "a fine day" | fasttfm predict --model DIR --data -
  fasttfm predict --model BERT-RUN --text "The war is over." "We have peace."       is the second the next sentence?
  fasttfm predict --model ALBERT-RUN --text "The war is over." "We have peace."     are they in their order?
  fasttfm predict --model ELECTRA-RUN --data texts.txt --output replaced.html       which tokens were replaced?
  fasttfm predict --model ELECTRA-RUN --data texts.txt --replace 0.15               which has its generator replaced?
  fasttfm predict --model DIR --data reviews.jsonl --output labels --rows-per-part 65536
  fasttfm predict --model GLINER --labels person place --text "Curie in Paris"       which entities of these types?

The model's directory states the task, its labels, the maximum length and the threshold for questions without an answer.
Examples come from files of the task's format, with or without labels, or from .txt files, .jsonl files and stdin (-),
which are read line by line and may be of any size:

{lines}

For the head of a pre-training run:

{pretrained}

Depending on the task, the output has for each example: its label, with the probability of every label; its tags; its
answer, with its place in the context and the score of having none; the choice between its endings; or the probability
of each token to be replaced. If all examples have labels, scores are printed. Replaced tokens are marked in the
terminal and on a page (.html). With --rows-per-part, --output is a folder of part files, which several processes write
together (torchrun -m fasttfm predict ...); scores are not printed then. With --labels, the model is GLiNER's: a line
of text, or the field text of a line of .jsonl, gets a JSON object with its entities; --text has a text for each one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fasttfm.cli.entities import run_entities
from fasttfm.cli.options import (
    MODEL_HELP,
    Formatter,
    add_column_options,
    add_device_option,
    check_output_file,
    columns_of,
    domain_table,
    exit_on_user_error,
    sentence,
)
from fasttfm.cli.part_runs import Write, add_part_options, is_in_parts, run_in_parts, settings_of
from fasttfm.tasks.pretraining_heads import PRETRAINED_TASKS, ReplacedTokensTask
from fasttfm.tasks.registry import TASKS


def add_parser(subparsers: Any) -> None:
    """Adds the ``predict`` command to a command line."""
    lines = f"  {'task':15} {'a line of text':34} fields of a line of .jsonl\n"
    lines += _listed(TASKS)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "predict",
        help="run a fine-tuned model or a pre-training head on new examples",
        description=str(__doc__).format(lines=lines, pretrained=_listed(PRETRAINED_TASKS)),
        formatter_class=Formatter,
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help=f"fine-tuned or pre-trained model: {MODEL_HELP}",
    )
    parser.add_argument(
        "--adapter",
        metavar="NAME",
        help="a LoRA adapter that is added to the model's weights: a folder of its directory, or another directory",
    )
    parser.add_argument("--data", metavar="FILE", help="file of examples; - reads lines from stdin")
    parser.add_argument("--text", nargs="+", metavar="TEXT", help="the texts of a single example, instead of --data")
    parser.add_argument(
        "--task",
        choices=tuple(PRETRAINED_TASKS),
        help="the head of a pre-trained checkpoint (default: the task or head that the model's directory states)",
    )
    parser.add_argument(
        "--replace",
        type=float,
        metavar="RATE",
        help="replaced-tokens: the run's generator replaces this fraction of the tokens before, as in pre-training",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of --replace")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="output file, or folder of part files (default: print to the terminal)",
    )
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl", "html", "parquet"),
        help="output format; html: a page of replaced tokens; parquet: only of part files (default: by the name of "
        "--output, or jsonl)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    parser.add_argument("--max-length", type=int, metavar="N", help="max tokens per sequence (default: the model's)")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="X",
        help="qa: give no answer if no_answer is above this threshold (default: the model's); --labels: entities "
        "have a higher probability (default: 0.5)",
    )
    parser.add_argument("--labels", nargs="+", metavar="TYPE", help="GLiNER: the types of entities, in words")
    parser.add_argument("--nested", action="store_true", help="GLiNER: entities may be inside of others")
    parser.add_argument("--tokens-per-batch", type=int, default=8192, metavar="N", help="tokens per packed batch")
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        help="compute precision (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    add_part_options(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_device_option(parser)
    add_column_options(parser.add_argument_group("columns", "of csv, tsv, jsonl and parquet files"))
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        from fasttfm.data.lines import DataError
        from fasttfm.tasks.prediction_files import Inputs, opened, read_inputs
        from fasttfm.train.progress import tracked

        if (arguments.text is None) == (arguments.data is None):
            got = "neither" if arguments.text is None else "both"
            raise ValueError(f"--data: expected a file of examples, or the texts of one with --text, got {got}")
        if arguments.labels is not None:
            return run_entities(arguments)
        from fasttfm.tasks.entities import is_gliner

        if is_gliner(arguments.model):
            raise ValueError(f"--labels: expected the types of entities for GLiNER ({arguments.model}), got none")
        if arguments.nested:
            raise ValueError("--nested: expected with --labels")
        if is_in_parts(arguments):
            return run_in_parts(arguments, PredictJob)
        if arguments.format == "parquet":
            raise ValueError("--format: parquet: expected with --rows-per-part")
        check_output_file(arguments)
        predictor = _predictor(arguments)
        task = predictor.task
        form = _format(arguments, task)
        if arguments.text is None:
            examples, total = read_inputs(task, arguments.data, _columns(arguments))
        else:
            examples, total = Inputs(iter([task.example_of_line("\t".join(arguments.text))]), 1)
        if arguments.replace is not None:
            examples = _replaced(arguments, task, examples)
        predictions: Any = predictor.stream(examples)
        if not arguments.quiet and arguments.text is None:
            predictions = tracked(predictions, "examples", total=total)
        known: list[tuple[Any, Any]] = []  # what scores need of examples with labels
        with opened(arguments.output) as file:
            writer = _writer(arguments, form, file, task)
            for example, result in predictions:
                writer.write(task.record(example, result))
                if task.gold(example) is not None:
                    known.append((task.without_text(example), task.prediction(result)))
            if predictor.counts.examples == 0:
                raise DataError(f"{arguments.data}: expected examples, got none")
            writer.close()
        if note := predictor.counts.note(predictor.max_length):
            warnings.warn(note, stacklevel=2)
        _summary(arguments, predictor, known)
    return 0


def _predictor(arguments: argparse.Namespace) -> Any:
    from fasttfm.tasks.loading import load

    options = {} if arguments.threshold is None else {"threshold": arguments.threshold}
    return load(
        arguments.model,
        task=arguments.task,
        adapter=arguments.adapter,
        tokenizer=arguments.tokenizer,
        max_length=arguments.max_length,
        device=arguments.device,
        precision=arguments.precision,
        tokens_per_batch=arguments.tokens_per_batch,
        **options,
    )


def _columns(arguments: argparse.Namespace) -> Any:
    """The columns that are named; None without any."""
    named = (arguments.text_column, arguments.pair_column, arguments.label_column)
    return columns_of(arguments) if any(named) or arguments.no_header else None


class PredictJob:
    """The predictions for a file as part files."""

    unit = "examples"

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = argparse.Namespace(**{**vars(arguments), "refuse": None})
        self.suffix = f".{arguments.format or 'jsonl'}"
        if arguments.replace is not None:
            raise ValueError("--replace: expected without part files")
        if arguments.format == "html":
            raise ValueError("--format: expected csv, jsonl or parquet with part files, got html")

    def settings(self) -> dict[str, Any]:
        names = (
            "task",
            "adapter",
            "precision",
            "max_length",
            "threshold",
            "text_column",
            "pair_column",
            "label_column",
        )
        return settings_of(self._arguments, (*names, "no_header"))

    def rows(self) -> Iterator[Any]:
        from fasttfm.tasks.prediction_files import example_rows

        return example_rows(self._arguments.data, lambda: _predictor(self._arguments).task, _columns(self._arguments))

    def open(self) -> Write:
        from fasttfm.tasks.prediction_files import examples_of_rows, write_predictions

        predictor, source = _predictor(self._arguments), self._arguments.data

        def write(path: Path, rows: Iterable[Any], first_row: int) -> int:
            predictions = predictor.stream(examples_of_rows(predictor.task, source, rows))
            return write_predictions(path, predictor.task, predictions, first_row)

        return write


def _format(arguments: argparse.Namespace, task: Any) -> str:
    """``format_of``, or ``marked`` for replaced tokens in the terminal. A page of another task raises ValueError."""
    form = format_of(arguments)
    replaced = task.name == ReplacedTokensTask.name
    if form == "html" and not replaced:
        raise ValueError(f"--format: expected csv or jsonl for the task {task.name}, got html")
    terminal = arguments.format is None and arguments.output is None
    return "marked" if replaced and terminal else form


def _replaced(arguments: argparse.Namespace, task: Any, examples: Iterator[Any]) -> Iterator[Any]:
    """The examples with tokens that the generator has replaced."""
    from fasttfm.tasks.generator import replaced_by_generator
    from fasttfm.tasks.language_models import load_language_model

    if task.name != ReplacedTokensTask.name:
        raise ValueError(f"--replace: expected with {ReplacedTokensTask.name}, got {task.name}")
    if not 0 < arguments.replace <= 1:
        raise ValueError(f"--replace: expected a number above 0 and up to 1, got {arguments.replace}")
    generator = load_language_model(
        arguments.model, masked=True, tokenizer=arguments.tokenizer, device=arguments.device
    )
    return replaced_by_generator(generator, examples, arguments.replace, seed=arguments.seed)


def _writer(arguments: argparse.Namespace, form: str, file: Any, task: Any) -> Any:
    """An object that writes records in a format."""
    from fasttfm.tasks.prediction_files import Writer
    from fasttfm.tasks.replaced_page import MarkedLines, Page

    if form == "html":
        return Page(file, f"Replaced tokens, found by {Path(arguments.model).resolve().name}")
    if form == "marked":
        return MarkedLines(file)
    return Writer(file, form, task.table)


def _summary(arguments: argparse.Namespace, predictor: Any, known: list[tuple[Any, Any]]) -> None:
    """The scores, and where the predictions are. The terminal has them already, so the rest goes to stderr."""
    file = sys.stderr if arguments.output is None else sys.stdout
    task, count = predictor.task, predictor.counts.examples
    if known and len(known) < count:
        warnings.warn(f"{len(known):,} of {count:,} examples have labels; they are scored", stacklevel=2)
    if known:
        examples, predictions = (list(column) for column in zip(*known, strict=True))
        try:
            task.check_labels(examples, arguments.data or "--text")
        except ValueError as error:
            warnings.warn(f"{error}; they count as wrong", stacklevel=2)
        print(f"scores     {sentence(task.scores(examples, predictions))}", file=file)
        if domains := task.domain_scores(examples, predictions):
            print(domain_table("scores", domains), file=file)
    if arguments.output is not None:
        print(f"output     {arguments.output} ({task.name}, {count:,} examples)", file=file)


def format_of(arguments: argparse.Namespace) -> str:
    """``--format``, or what ``--output`` ends in."""
    if arguments.format is not None:
        return str(arguments.format)
    suffix = "" if arguments.output is None else arguments.output.suffix
    return suffix[1:] if suffix in (".csv", ".html") else "jsonl"


def _listed(tasks: Mapping[str, Any]) -> str:
    return "\n".join(f"  {name:15} {task.line_format:34} {task.json_fields}" for name, task in tasks.items())
