"""``fasttfm show``: draws the attention probabilities of a text, or the curves of several runs.

  fasttfm show attention --model DIR --text "The cat sat on the mat." --output attention.html
  fasttfm show curves --runs small large --columns validation_perplexity --output perplexity.png

Each writes one file, which must be new.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fasttfm.cli.options import (
    MODEL_HELP,
    Formatter,
    add_device_option,
    check_new_file,
    device_of,
    exit_on_user_error,
)

_ATTENTION = """Draws the attention probabilities of a text, one small map per head.

  fasttfm show attention --model DIR --text "The cat sat on the mat." --output attention.html
  fasttfm show attention --model DIR --text "Is it?" --second "It is." --layers 1,12 --heads 1-6 --output attention.png

An .html page is self-contained and enlarges a map on a click; a .png image needs matplotlib. Layers and heads are
counted from 1.
"""
_CURVES = """Draws the curves of several runs in one picture, a panel for each column of their log.csv.

  fasttfm show curves --runs runs/nsp runs/mlm --columns masked_lm next_sentence --output losses.png
  fasttfm show curves --runs small large --columns validation_perplexity --output perplexity.png

A run is an output directory of fasttfm pretrain, finetune, distill or pretrain-knowledge. A run without a column has no
curve in its panel.
"""


def add_parser(subparsers: Any) -> None:
    """Adds the ``show`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "show", help="draw attention probabilities, or curves of runs", description=__doc__, formatter_class=Formatter
    )
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    kind = kinds.add_parser(
        "attention", help="attention probabilities of a text", description=_ATTENTION, formatter_class=Formatter
    )
    kind.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    kind.add_argument("--text", required=True, metavar="TEXT", help="the text that the model reads")
    kind.add_argument("--second", metavar="TEXT", help="the second text of a pair")
    kind.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    kind.add_argument("--layers", metavar="N,N,...", help="such as 1,2 or 1-4 (default: all)")
    kind.add_argument("--heads", metavar="N,N,...", help="such as 1,2 or 1-4 (default: all)")
    kind.add_argument("--max-tokens", type=int, default=128, metavar="N", help="truncate longer texts")
    _add_output(kind, "output file that ends in .html or .png")
    add_device_option(kind)
    kind = kinds.add_parser("curves", help="curves of several runs", description=_CURVES, formatter_class=Formatter)
    kind.add_argument("--runs", required=True, nargs="+", type=Path, metavar="DIR", help="output directories")
    kind.add_argument("--columns", required=True, nargs="+", metavar="NAME", help="columns of log.csv")
    _add_output(kind, "output file that ends in .png")


def _add_output(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=about)
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    return _attention(arguments) if arguments.what == "attention" else _curves(arguments)


def _curves(arguments: argparse.Namespace) -> int:
    with exit_on_user_error(arguments):
        output: Path = arguments.output
        if output.suffix != ".png":
            raise ValueError(f"--output: expected a name that ends in .png, got {output}")
        check_new_file(output, overwrite=arguments.overwrite)

        from fasttfm.train.compared_curves import compare_curves

        compare_curves(arguments.runs, arguments.columns, output)
        print(f"{len(arguments.runs)} run{'s' if len(arguments.runs) > 1 else ''}: {output}")
    return 0


def _attention(arguments: argparse.Namespace) -> int:
    with exit_on_user_error(arguments):
        output: Path = arguments.output
        if output.suffix not in (".html", ".png"):
            raise ValueError(f"--output: expected a name that ends in .html or .png, got {output}")
        if arguments.max_tokens < 3:
            raise ValueError(f"--max-tokens: expected a number from 3 on, got {arguments.max_tokens}")
        check_new_file(output, overwrite=arguments.overwrite)
        layers, heads = (_numbers(name, getattr(arguments, name)) for name in ("layers", "heads"))

        from fasttfm.data.tokenizer_files import load_tokenizer
        from fasttfm.inference.opening import open_model
        from fasttfm.models.family import Head
        from fasttfm.tasks.attention_maps import attention_maps

        tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
        model = open_model(arguments.model, Head.NONE).to(device_of(arguments))
        maps = attention_maps(model, tokenizer, arguments.text, arguments.second, max_tokens=arguments.max_tokens)
        maps = maps.select(layers, heads)
        maps.save(output, f"Attention of {Path(arguments.model).resolve().name}")
        count = len(maps.layers) * len(maps.heads)
        print(f"{count:,} maps of {len(maps.tokens)} x {len(maps.tokens)} tokens: {output}")
    return 0


def _numbers(name: str, value: str | None) -> list[int] | None:
    """``1,3-5`` as numbers."""
    if value is None:
        return None
    numbers: list[int] = []
    try:
        for part in value.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except ValueError:
        numbers = []
    if not numbers:
        raise ValueError(f"--{name}: expected numbers such as 1,2 or 1-4, got {value!r}")
    return numbers
