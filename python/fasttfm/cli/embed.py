"""``fasttfm embed``: writes a vector for each text, from a trained model that is left as it is.

  fasttfm embed --model DIR --data texts.txt --output vectors.npy
  fasttfm embed --model DIR --data reviews.jsonl --layers 4 --pooling first --output vectors.safetensors

Texts are those of .txt files (separated by blank lines, or one a line with --lines), .jsonl (their "text"), .parquet or
a directory of such files. The vectors are one array [texts, width], fp32, in the order of the texts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasttfm.atomic_files import atomic_write
from fasttfm.cli.options import Formatter, add_device_option, device_of, exit_on_user_error

_SUFFIXES = (".npy", ".safetensors")


def add_parser(subparsers: Any) -> None:
    """Adds the ``embed`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "embed", help="write embeddings of texts", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint directory of transformers or fasttfm")
    parser.add_argument("--data", required=True, nargs="+", metavar="PATH", help="files, directories or patterns")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="a name that ends in .npy or .safetensors"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument("--lines", action="store_true", help="every non-empty line of a .txt file is a text")
    parser.add_argument("--tokenizer", metavar="PATH", help="default: the model's directory")
    parser.add_argument(
        "--pooling",
        choices=("mean", "first", "last"),
        default="mean",
        help="pooling over a text's tokens; the first is [CLS]",
    )
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="concatenate the last N layers")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="max tokens per text; by default as many as the model has positions"
    )
    parser.add_argument("--tokens-per-batch", type=int, default=16384, metavar="N", help="tokens per batch")
    add_device_option(parser)
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        if arguments.output.suffix not in _SUFFIXES:
            raise ValueError(f"--output: expected a name that ends in {' or '.join(_SUFFIXES)}, got {arguments.output}")
        _check_output(arguments)
        import numpy as np

        from fasttfm.data.tokenizer import load_tokenizer
        from fasttfm.models.family import Head
        from fasttfm.tasks.embedding import embed
        from fasttfm.tasks.families import open_model

        tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
        model = open_model(arguments.model, Head.NONE).to(device_of(arguments))
        vectors = embed(
            model,
            tokenizer,
            _texts(arguments),
            pooling=arguments.pooling,
            layers=arguments.layers,
            max_length=arguments.max_length,
            tokens_per_batch=arguments.tokens_per_batch,
        )
        found = list(vectors)
        if not found:
            raise ValueError("--data: expected texts, got none")
        _write(arguments.output, np.stack(found))
        print(f"{len(found)} vectors of {len(found[0])} numbers: {arguments.output}")
    return 0


def _check_output(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.is_dir():
        raise ValueError(f"--output: expected a file, got the directory {output}")
    if output.exists() and output.resolve().parent == Path(os.path.realpath(arguments.model)):
        raise ValueError(f"--output: expected a file that is not the model's, got {output}")
    if output.exists() and not arguments.overwrite:
        raise ValueError(f"--output: expected a new file, got {output}, which exists; --overwrite replaces it")
    output.parent.mkdir(parents=True, exist_ok=True)


def _texts(arguments: argparse.Namespace) -> Iterator[str]:
    from fasttfm.data.texts import files_of, read_documents, read_lines

    for path in files_of(arguments.data) or []:
        if arguments.lines and path.name.endswith((".txt", ".txt.gz")):
            yield from (line for _, line in read_lines(path) if line.strip())
        else:
            yield from read_documents(path)


def _write(path: Path, vectors: Any) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    with atomic_write(path) as partial:
        if path.suffix == ".safetensors":
            save_file({"vectors": vectors}, partial)
        else:
            with partial.open("wb") as file:
                np.save(file, vectors)
