"""``fasttfm embed``: writes a vector for each text, computed by a trained model.

  fasttfm embed --model DIR --data texts.txt --output vectors.npy
  fasttfm embed --model DIR --data reviews.jsonl --layers sum:4 --pooling first --output vectors.safetensors
  fasttfm embed --model DIR --data - --tokens --output tokens.npz < texts.txt
  fasttfm embed --model DIR --data corpus/ --output vectors --rows-per-part 65536

Texts are the lines of .txt files (vector i is that of line i; empty lines count), the "text" fields of .jsonl files, or
the column "text" of .csv, .tsv and .parquet files (--text-column). --split changes how .txt files are divided. The
vectors are one array [texts, width] in the order of the texts. With --rows-per-part, --output is a folder of part
files, which several processes write together (torchrun -m fasttfm embed ...). For a folder of sentence-transformers,
its own pooling, prompts, length and normalization are used: the vectors are those of SentenceTransformer.encode.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fasttfm.cli.options import (
    MODEL_HELP,
    Formatter,
    add_device_option,
    check_output_file,
    device_of,
    exit_on_user_error,
    note_precision,
)
from fasttfm.cli.part_runs import Write, add_part_options, is_in_parts, run_in_parts, settings_of

SPLITS = ("line", "document", "file")
_SUFFIXES = (".npy", ".npz", ".safetensors", ".jsonl", ".csv", ".parquet")


def add_parser(subparsers: Any) -> None:
    """Adds the ``embed`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "embed", help="write embeddings of texts to a file", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, directories or glob patterns; - reads lines from stdin",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help=f"output file that ends in {', '.join(_SUFFIXES)}; or the folder of part files",
    )
    parser.add_argument(
        "--format",
        choices=tuple(suffix[1:] for suffix in _SUFFIXES),
        help="format of part files (default: parquet); that of a file follows from its name",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default="line",
        help="divide .txt files into lines, documents (between blank lines) or whole files",
    )
    parser.add_argument(
        "--text-column",
        default="text",
        metavar="NAME",
        help="column of the text in .jsonl, .csv, .tsv and .parquet files",
    )
    parser.add_argument("--lines", dest="split", action="store_const", const="line", help=argparse.SUPPRESS)
    parser.add_argument(
        "--tokens", action="store_true", help="write a vector for each token instead (.npz, .safetensors or .jsonl)"
    )
    parser.add_argument(
        "--multi",
        action="store_true",
        help="write a vector for each token of documents instead, of a model of ColBERT's kind (.npz or .safetensors)",
    )
    chunks = parser.add_mutually_exclusive_group()
    chunks.add_argument(
        "--chunks", type=int, metavar="N", help="write a vector for each N tokens of long texts (.npz or .safetensors)"
    )
    chunks.add_argument(
        "--late-chunks",
        type=int,
        metavar="N",
        help="the same, of tokens that have read the whole text (late chunking)",
    )
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="write weights of words instead: SPLADE's of a model with a masked-LM head, or bge-m3's (.npz or .jsonl)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "int8", "uint8", "binary", "ubinary"),
        default="float32",
        help="type of the vectors in the file; int8 and uint8: 256 steps of each element's range, which the file "
        "stores; binary and ubinary: signs, eight to a byte",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="a file of vectors whose ranges --dtype int8 and uint8 use (default: those of the vectors)",
    )
    add_model_options(parser)
    add_part_options(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(refuse=parser.error)


def add_model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the options that say how a text becomes a vector."""
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--model",
        required=required,
        metavar="MODEL",
        help=MODEL_HELP,
    )
    group.add_argument(
        "--adapter",
        metavar="NAME",
        help="a LoRA adapter that is added to the model's weights: a folder of its directory, or another directory",
    )
    group.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    group.add_argument(
        "--pooling",
        metavar="NAME",
        help="pooling over a text's tokens: mean, first ([CLS]), last, max, mean-sqrt, weighted, or several as in "
        "mean,max; or splade, over the logits of a masked-LM head (default: that of a sentence-transformers folder, or "
        "mean)",
    )
    group.add_argument(
        "--layers",
        metavar="CHOICE",
        help="last, second-to-last, embeddings, concat:N, sum:N or mean:N of the last N layers (all: of the embeddings "
        "and all layers), or weights:W,W,...; N means concat:N (default: last)",
    )
    group.add_argument(
        "--dimensions",
        type=int,
        metavar="N",
        help="keep the first N elements of vectors, of a model trained for it (Matryoshka embeddings; default: all)",
    )
    group.add_argument("--normalize", action="store_true", help="scale vectors to length 1")
    group.add_argument("--prompt", metavar="TEXT", help="prefix of each text")
    group.add_argument(
        "--prompt-name", metavar="NAME", help="one of the prompts of a sentence-transformers folder, such as query"
    )
    group.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="max tokens per text (default: that of a sentence-transformers folder, or the model's number of "
        "positions)",
    )
    group.add_argument(
        "--tokens-per-batch",
        type=int,
        metavar="N",
        help="tokens per batch (default: 16384 on a GPU, 2048 on a CPU)",
    )
    group.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "int8", "auto"),
        help="compute precision; int8: 8-bit GEMMs, on a CPU; auto: the fastest on this CPU that keeps the vectors of "
        "sample texts, bfloat16 on a GPU (default: auto; of part files bfloat16 on a GPU, float32 on a CPU)",
    )
    add_device_option(group)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        if is_in_parts(arguments):
            return run_in_parts(arguments, EmbedJob)
        if arguments.format is not None:
            raise ValueError(f"--format: expected with --rows-per-part, got {arguments.format}")
        _check_output(arguments)
        check_output_file(arguments)
        ranges = _ranges(arguments)
        embedder = embedder_of(arguments, sparse=arguments.sparse)
        texts = read_texts(arguments.data, arguments.split, arguments.text_column)
        print(write_texts(arguments, embedder, texts, arguments.output, ranges, tracks=not arguments.quiet))
    return 0


def write_texts(
    arguments: argparse.Namespace,
    embedder: Any,
    texts: Iterable[str],
    output: Path,
    ranges: Any,
    *,
    tracks: bool = False,
    first_row: int | None = None,
) -> str:
    """Writes the vectors of texts to a file. Returns a sentence about them."""
    from fasttfm.inference.chunks import chunk_vectors
    from fasttfm.tasks.vector_files import Row, write_vectors

    # The copy of the texts is as far ahead as a batch, so that memory is bounded.
    texts, again = itertools.tee(texts)
    if arguments.sparse:
        return _write_sparse(arguments, embedder, texts, again, output, tracks=tracks)
    size = arguments.late_chunks if arguments.chunks is None else arguments.chunks
    if size is not None:
        late = arguments.late_chunks is not None
        vectors_and_ids = ((vectors, None) for vectors in chunk_vectors(embedder.session, texts, size, late=late))
    elif arguments.multi:
        vectors_and_ids = ((vectors, None) for vectors in embedder.session.stream(texts, output="multi"))
    elif arguments.tokens:
        vectors_and_ids = ((vectors, ids) for ids, vectors in embedder.token_vectors(texts))
    else:
        vectors_and_ids = ((vector, None) for vector in embedder.vectors(texts))
    rows: Iterator[Row] = (Row(text, vector, ids) for (vector, ids), text in zip(vectors_and_ids, again, strict=True))
    if tracks:
        rows = _tracked(arguments, rows)
    count, width = write_vectors(
        output,
        _some(rows),
        dtype=arguments.dtype,
        ranges=ranges,
        settings=_settings(arguments),
        parts="offsets" if size is None else "chunks",
        first_row=first_row,
    )
    kind = "texts' token vectors" if arguments.tokens or arguments.multi else "vectors"
    kind = kind if size is None else "texts' chunks, vectors"
    rate = f"{embedder.session.counts.tokens_per_second:,.0f} tokens/s"
    return f"{count:,} {kind} of {width:,} numbers: {output} ({rate})"


def _write_sparse(
    arguments: argparse.Namespace,
    embedder: Any,
    texts: Iterator[str],
    again: Iterator[str],
    output: Path,
    *,
    tracks: bool,
) -> str:
    from fasttfm.tasks.sparse_files import write_sparse

    rows: Iterator[Any] = zip(again, embedder.sparse_vectors(texts), strict=True)
    if tracks:
        rows = _tracked(arguments, rows)
    session = embedder.session
    count, weights = write_sparse(output, _some(rows), session.network.sparse_width)
    rate = f"{session.counts.tokens_per_second:,.0f} tokens/s"
    return f"{count:,} sparse vectors of {weights / count:,.1f} weights: {output} ({rate})"


class EmbedJob:
    """The vectors of a corpus as part files."""

    unit = "texts"

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.suffix = f".{arguments.format or ('npz' if arguments.sparse else 'parquet')}"
        self._arguments = argparse.Namespace(**{**vars(arguments), "refuse": None})
        _check_format(self._arguments, self.suffix, "--format")
        if arguments.dtype in ("int8", "uint8") and arguments.calibration is None:
            raise ValueError(f"--dtype: {arguments.dtype}: expected --calibration, so that all parts have its ranges")

    def settings(self) -> dict[str, Any]:
        names = ("adapter", "pooling", "layers", "dimensions", "normalize", "prompt", "prompt_name", "max_length")
        forms = ("precision", "dtype", "tokens", "multi", "sparse", "chunks", "late_chunks", "split", "text_column")
        return settings_of(self._arguments, (*names, *forms))

    def rows(self) -> Iterator[Any]:
        from fasttfm.tasks.text_rows import text_rows

        return text_rows(self._arguments.data, self._arguments.split, self._arguments.text_column)

    def open(self) -> Write:
        from fasttfm.tasks.text_rows import texts_of_rows

        arguments, ranges = self._arguments, _ranges(self._arguments)
        embedder = embedder_of(arguments, sparse=arguments.sparse)

        def write(path: Path, rows: Iterable[Any], first_row: int) -> str:
            texts = texts_of_rows(rows, arguments.text_column)
            return write_texts(arguments, embedder, texts, path, ranges, first_row=first_row)

        return write


def embedder_of(arguments: argparse.Namespace, prompt_name: str | None = None, *, sparse: bool = False) -> Any:
    """The model with the settings of ``add_model_options``, over those of its folder; ``sparse`` says that it computes
    sparse vectors."""
    from dataclasses import replace

    from fasttfm.data.tokenizer_files import load_tokenizer
    from fasttfm.inference.opening import open_model
    from fasttfm.inference.pooling import SPLADE, pooling_names
    from fasttfm.inference.sentence_folder import read_sentence_folder
    from fasttfm.models.family import Head
    from fasttfm.tasks.embedding import Embedder, EmbedSettings

    if arguments.prompt is not None and arguments.prompt_name is not None:
        raise ValueError("--prompt: expected without --prompt-name, got both")
    folder = read_sentence_folder(arguments.model)
    named = arguments.prompt_name or prompt_name
    settings = EmbedSettings.of_folder(folder, prompt_name=named)
    changes = {name: getattr(arguments, name) for name in ("pooling", "layers", "prompt", "max_length", "dimensions")}
    changes = {name: value for name, value in changes.items() if value is not None}
    settings = replace(settings, normalize=arguments.normalize, **changes)
    device = device_of(arguments)
    has_words = SPLADE in pooling_names(settings.pooling) or (sparse and settings.token_weights is None)
    head = Head.MASKED_LM if has_words else Head.NONE
    embedder = Embedder(
        open_model(folder.model, head, adapter=arguments.adapter).to(device),
        load_tokenizer(arguments.tokenizer or folder.model),
        settings,
        tokens_per_batch=arguments.tokens_per_batch,
        precision=arguments.precision or "auto",
    )
    note_precision(arguments, embedder.session)
    return embedder


def _check_output(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.suffix not in _SUFFIXES:
        raise ValueError(f"--output: expected a name that ends in {', '.join(_SUFFIXES)}, got {output}")
    _check_format(arguments, output.suffix, "--output")


def _check_format(arguments: argparse.Namespace, suffix: str, option: str) -> None:
    """Raises ValueError if files with this suffix cannot have what the command computes. ``option`` states it."""
    from fasttfm.tasks.vector_files import check_type

    arrays = (".npz", ".safetensors")
    able = {
        "tokens": (*arrays, ".jsonl", ".parquet"),
        "sparse": (".npz", ".jsonl"),
        "multi": (*arrays, ".parquet"),
        "chunks": arrays,
        "late_chunks": arrays,
    }
    chosen = [name for name in able if getattr(arguments, name) not in (None, False)]
    for name in chosen:
        others = [other for other in chosen if other != name and list(able).index(other) < list(able).index(name)]
        if suffix not in able[name] or others:
            *first, last = able[name]
            form = "with a name that ends in" if option == "--output" else "of a file that ends in"
            got = _option(others[0]) if others else f"{arguments.output if option == '--output' else suffix}"
            raise ValueError(f"{_option(name)}: expected {option} {form} {', '.join(first)} or {last}, got {got}")
    check_type(suffix, arguments.dtype)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _ranges(arguments: argparse.Namespace) -> Any:
    """The ranges of --calibration; None without it."""
    import numpy as np

    from fasttfm.inference.quantization import WITH_RANGES
    from fasttfm.tasks.vector_files import VectorFile

    if arguments.calibration is None:
        return None
    if arguments.dtype not in WITH_RANGES:
        raise ValueError(f"--calibration: expected with --dtype {' or '.join(WITH_RANGES)}, got {arguments.dtype}")
    calibration = VectorFile(arguments.calibration)
    if calibration.ranges is not None:
        return calibration.ranges
    if calibration.precision != "float32":
        raise ValueError(f"--calibration: expected vectors that are not signs, got {calibration.precision}")
    lows, highs = zip(*((block.min(0), block.max(0)) for block, _ in calibration.blocks(1 << 14)), strict=True)
    return np.stack([np.min(lows, 0), np.max(highs, 0)])


def read_texts(sources: Sequence[str], split: str, column: str = "text") -> Iterator[str]:
    """The texts of files, directories, patterns and stdin (``-``); ``split`` is one of ``SPLITS``, and ``column`` that
    of files with columns."""
    from fasttfm.data.lines import read_lines
    from fasttfm.data.texts import files_of, read_documents

    for source in sources:
        if source == "-":
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            continue
        for path in files_of(source) or []:
            if split == "document" or not path.name.endswith((".txt", ".txt.gz")):
                yield from read_documents(path, column=column)
            elif split == "line":
                yield from (line for _, line in read_lines(path))
            else:
                yield "\n".join(line for _, line in read_lines(path))


def _tracked(arguments: argparse.Namespace, rows: Iterator[Any]) -> Iterator[Any]:
    """Rows with a progress bar. Files are read twice, the first time to count their texts."""
    from fasttfm.train.progress import tracked

    total = (
        None
        if "-" in arguments.data
        else sum(1 for _ in read_texts(arguments.data, arguments.split, arguments.text_column))
    )
    return tracked(rows, "texts", total=total)


def _some(rows: Iterator[Any]) -> Iterator[Any]:
    from fasttfm.data.lines import DataError

    first = next(rows, None)
    if first is None:
        raise DataError("--data: expected texts, got none")
    return itertools.chain([first], rows)


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    """What ``fasttfm search`` needs to make vectors of queries in the same way."""
    names = ("pooling", "layers", "dimensions", "normalize", "max_length")
    return {name: str(getattr(arguments, name)) for name in names if getattr(arguments, name)}
