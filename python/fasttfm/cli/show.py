"""``fasttfm show attention``: draws the attention probabilities of a text, one small map per head.

  fasttfm show attention --model DIR --text "The cat sat on the mat." --output attention.html
  fasttfm show attention --model DIR --text "Is it?" --second "It is." --layers 1,12 --heads 1-6 --output attention.png

An .html page is self-contained and enlarges a map on a click; a .png image needs matplotlib. Layers and heads are
counted from 1.
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


def add_parser(subparsers: Any) -> None:
    """Adds the ``show`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "show", help="draw attention probabilities", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("what", choices=("attention",), help="what to draw")
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--text", required=True, metavar="TEXT", help="the text that the model reads")
    parser.add_argument("--second", metavar="TEXT", help="the second text of a pair")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="output file that ends in .html or .png"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    parser.add_argument("--layers", metavar="N,N,...", help="such as 1,2 or 1-4 (default: all)")
    parser.add_argument("--heads", metavar="N,N,...", help="such as 1,2 or 1-4 (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="truncate longer texts")
    add_device_option(parser)
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        output: Path = arguments.output
        if output.suffix not in (".html", ".png"):
            raise ValueError(f"--output: expected a name that ends in .html or .png, got {output}")
        if arguments.max_tokens < 3:
            raise ValueError(f"--max-tokens: expected a number from 3 on, got {arguments.max_tokens}")
        check_new_file(output, overwrite=arguments.overwrite)
        layers, heads = (_numbers(name, getattr(arguments, name)) for name in ("layers", "heads"))

        from fasttfm.inference.opening import open_model, tokenizer_of
        from fasttfm.models.family import Head
        from fasttfm.tasks.attention_maps import attention_maps

        tokenizer = tokenizer_of(arguments.tokenizer or arguments.model)
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
