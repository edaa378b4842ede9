"""``fasttfm fill-mask``: predicts the most likely words for the masks of a text.

  fasttfm fill-mask --model DIR --text "The state of the [MASK] is strong."
  fasttfm fill-mask --model RUN --data texts.txt --top-k 10 --output words.csv
  fasttfm fill-mask --model RUN --text "The state of the union is strong." --rates 0.15,0.3,0.45,0.6

The model is a masked language model. For a pre-training run, its newest checkpoint is used; for ELECTRA, the generator.
Write the mask as in the model's vocabulary: [MASK], or <mask> for RoBERTa. With --rates, texts have no masks: random
tokens are masked at each rate, and the predictions are compared with them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasttfm.cli.options import MODEL_HELP, Formatter, add_device_option, check_output_file, exit_on_user_error


def add_parser(subparsers: Any) -> None:
    """Adds the ``fill-mask`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fill-mask", help="predict the masked tokens of texts", description=__doc__, formatter_class=Formatter
    )
    add_language_model_options(parser)
    parser.add_argument("--top-k", type=int, default=5, metavar="K", help="number of words per mask")
    parser.add_argument(
        "--rates", metavar="RATE,...", help="mask random tokens at these rates, and show how many are predicted"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the tokens that --rates masks")
    parser.set_defaults(refuse=parser.error)


def add_language_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``fill-mask`` and ``score`` share."""
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--text", metavar="TEXT", help="a single text, instead of --data")
    parser.add_argument(
        "--data", metavar="FILE", help=".txt (one text per line) or .jsonl (the field text); - reads lines from stdin"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="output file (default: print to the terminal)")
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl"),
        help="output format (default: by the name of --output, or plain lines for the terminal)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    parser.add_argument("--tokens-per-batch", type=int, default=8192, metavar="N", help="tokens per packed batch")
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        help="compute precision (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_device_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        texts, again = itertools.tee(row["text"] for row in texts_of(arguments))
        rates = None if arguments.rates is None else _rates(arguments.rates)
        model = language_model_of(arguments, masked=True)
        if rates is not None:
            _fill_at_rates(arguments, model, texts, again, rates)
            return 0

        def records() -> Iterator[dict[str, Any]]:
            for text, masks in zip(again, model.fill_mask(texts, arguments.top_k), strict=True):
                yield {"text": text, "masks": [[guess._asdict() for guess in guesses] for guesses in masks]}

        write_records(arguments, model, records(), _rows, _lines)
    return 0


def _rates(value: str) -> list[float]:
    try:
        rates = [float(part) for part in value.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate <= 1 for rate in rates):
        raise ValueError(f"--rates: expected numbers above 0 and up to 1, such as 0.15,0.3, got {value!r}")
    return rates


def _fill_at_rates(
    arguments: argparse.Namespace, model: Any, texts: Iterator[str], again: Iterator[str], rates: list[float]
) -> None:
    """Writes texts that are masked at several rates, and a table of the rates if there are several texts."""
    from fasttfm.tasks.experiments.lab import table
    from fasttfm.tasks.masking_rates import accuracy_by_rate, fill_at_rates

    kept: list[Any] = []

    def records() -> Iterator[dict[str, Any]]:
        for text, results in zip(again, fill_at_rates(model, texts, rates, seed=arguments.seed), strict=True):
            kept.append([result._replace(masked="", filled="") for result in results])
            yield {"text": text, "rates": [result._asdict() for result in results]}

    def rows(record: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"text": record["text"], **rate} for rate in record["rates"]]

    def lines(record: dict[str, Any]) -> str:
        shown = [record["text"]]
        for rate in record["rates"]:
            shown += [f"{rate['rate']:>5.0%}  {rate['masked']}"]
            shown += [f"{'':5}  {rate['filled']}  ({rate['right']} of {rate['tokens']})"]
        return "\n".join(shown)

    count = write_records(arguments, model, records(), rows, lines)
    if count > 1:
        print(f"\n{table(accuracy_by_rate(kept))}", file=sys.stderr if arguments.output is None else sys.stdout)


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "text": record["text"],
            "mask": mask,
            "rank": rank,
            "token": guess["token"],
            "probability": guess["probability"],
        }
        for mask, guesses in enumerate(record["masks"], 1)
        for rank, guess in enumerate(guesses, 1)
    ]


def _lines(record: dict[str, Any]) -> str:
    lines = [record["text"]]
    for number, guesses in enumerate(record["masks"], 1):
        lines += [f"mask {number}"] if len(record["masks"]) > 1 else []
        lines += [f"  {guess['probability']:.4f}  {guess['token']}" for guess in guesses]
    return "\n".join(lines)


# ---- what fill-mask and score share ----------------------------------------------------------------------------------


def texts_of(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Objects with a ``text``: that of ``--text``, or those of ``--data``."""
    from fasttfm.data.lines import DataError
    from fasttfm.tasks.prediction_files import read_texts

    if (arguments.text is None) == (arguments.data is None):
        raise ValueError(
            "--text: expected one of --text and --data, got both"
            if arguments.text
            else "--text: expected a text, or a file with --data, got neither"
        )
    check_output_file(arguments)
    if arguments.text is not None:
        try:
            arguments.text.encode()
        except UnicodeEncodeError:
            raise ValueError("--text: expected UTF-8 text, got other bytes") from None

    def read() -> Iterator[dict[str, Any]]:
        items = [arguments.text] if arguments.data is None else read_texts(arguments.data)
        for number, item in enumerate(items, 1):
            row = {"text": item} if isinstance(item, str) else item
            if not isinstance(row.get("text"), str):
                raise DataError(f"{arguments.data}: object {number}: expected a string 'text', got {', '.join(row)}")
            yield row

    return read()


def language_model_of(arguments: argparse.Namespace, *, masked: bool) -> Any:
    from fasttfm.tasks.language_models import load_language_model

    return load_language_model(
        arguments.model,
        masked=masked,
        tokenizer=arguments.tokenizer,
        device=arguments.device,
        precision=arguments.precision,
        tokens_per_batch=arguments.tokens_per_batch,
    )


def write_records(arguments: argparse.Namespace, model: Any, records: Iterator[Any], table: Any, lines: Any) -> int:
    """Writes records as they come, to the terminal or to ``--output``; returns their number."""
    from fasttfm.data.lines import DataError
    from fasttfm.tasks.prediction_files import Writer, opened
    from fasttfm.train.progress import tracked

    form = arguments.format
    if form is None and arguments.output is not None:
        form = "csv" if arguments.output.suffix == ".csv" else "jsonl"
    count = 0
    with opened(arguments.output) as file:
        writer = Writer(file, form, table)
        for record in records if arguments.quiet or arguments.data is None else tracked(records, "texts"):
            count += 1
            if form is None:
                print(lines(record), file=file)
            else:
                writer.write(record)
        if count == 0:
            raise DataError(f"{arguments.data}: expected texts, got none")
    if model.truncated:
        what = f"{model.truncated:,} of {count:,} texts have more than the model's {model.longest} tokens"
        warnings.warn(f"{what} and are truncated", stacklevel=2)
    if arguments.output is not None:
        print(f"output     {arguments.output} ({count:,} texts)", file=sys.stdout)
    return count
