"""``fasttfm search``: finds the texts whose vectors are nearest to a query's by cosine similarity.

  fasttfm embed --model DIR --data texts.txt --output vectors.npy
  fasttfm search --vectors vectors.npy --texts texts.txt --model DIR --query "peace with all nations"
  fasttfm search --vectors vectors.jsonl --query-vectors queries.npy --top 5 --output found.jsonl
  torchrun --nproc-per-node 8 -m fasttfm embed --model DIR --data corpus/ --output parts
  fasttfm search --vectors parts --model DIR --query "peace with all nations"

The file of vectors is read block by block and may be larger than memory; --vectors can also be a complete folder of
part files. Texts come from --texts, one for each vector, or from the file of vectors (.jsonl, .csv and .parquet contain
them). Queries must be embedded like the texts: pass the same --pooling and --layers as to embed (a .safetensors file
and a folder of part files store them). If a sentence-transformers folder has a prompt "query", it is prepended to
queries.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import atomic_write
from fasttfm.cli.embed import SPLITS, add_model_options, embedder_of, read_texts
from fasttfm.cli.options import Formatter, check_new_file, device_of, exit_on_user_error

# The queries, and what finds their matches in a file and says how many texts the file has.
Opened = tuple[list[str], Callable[[Path], tuple[list[list[Any]], int]]]


def add_parser(subparsers: Any) -> None:
    """Adds the ``search`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "search",
        help="find texts by the similarity of their embeddings",
        description=__doc__,
        formatter_class=Formatter,
    )
    parser.add_argument(
        "--vectors", required=True, metavar="PATH", help="output file of fasttfm embed, or folder of its part files"
    )
    parser.add_argument("--texts", nargs="+", metavar="PATH", help="the texts of the vectors, as given to embed --data")
    parser.add_argument(
        "--split", choices=SPLITS, default="line", help="how .txt files of --texts are divided, as given to embed"
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="column of the text in --texts")
    parser.add_argument(
        "--query", action="append", default=[], metavar="TEXT", help="a query; repeat the option for several"
    )
    parser.add_argument("--queries", metavar="FILE", help="file of queries, one per line; - reads stdin")
    parser.add_argument("--query-vectors", metavar="FILE", help="vectors of queries, instead of texts and --model")
    parser.add_argument(
        "--index",
        type=Path,
        metavar="FILE",
        help="search by an index of neighbours over 100,000 vectors or more, which is made if there is none (the extra "
        "search); its matches are about the nearest ones (default: all vectors are compared)",
    )
    parser.add_argument("--top", type=int, default=10, metavar="K", help="matches for each query")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write matches as .jsonl instead of printing them")
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_model_options(parser, required=False)
    parser.set_defaults(refuse=parser.error, normalize=False)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        _check(arguments)
        from fasttfm.tasks.search import with_texts

        names, matches, count = _search(arguments)
        if arguments.texts is not None:
            texts = read_texts(arguments.texts, arguments.split, arguments.text_column)
            matches = with_texts(matches, texts, count, arguments.texts[0])
        if arguments.output is None:
            _print(names, matches)
        else:
            _write(arguments.output, names, matches)
            print(f"{len(names):,} queries, {sum(map(len, matches)):,} matches: {arguments.output}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    as_texts = bool(arguments.query or arguments.queries)
    if as_texts == (arguments.query_vectors is not None):
        raise ValueError("--query: expected --query or --queries, or else --query-vectors")
    if as_texts and arguments.model is None:
        raise ValueError("--model: expected the model that made the vectors, got none")
    if arguments.top < 1:
        raise ValueError(f"--top: expected a number from 1 on, got {arguments.top}")
    output: Path | None = arguments.output
    if output is not None:
        if output.suffix != ".jsonl":
            raise ValueError(f"--output: expected a name that ends in .jsonl, got {output}")
        check_new_file(output, overwrite=arguments.overwrite)


def _search(arguments: argparse.Namespace) -> tuple[list[str], list[list[Any]], int]:
    """The queries, their matches, and the number of texts, of a file or of all part files."""
    from fasttfm.tasks.search import keep_best
    from fasttfm.tasks.sparse_files import is_sparse
    from fasttfm.train.progress import tracked

    files, settings = _files(Path(arguments.vectors))
    has_parts = len(files) > 1  # then the progress is that of the parts
    open_search = _sparse_search if is_sparse(files[0]) else _vector_search
    names, search = open_search(arguments, files[0], settings, not has_parts and not arguments.quiet)
    best: list[list[Any]] = [[] for _ in names]
    count = 0
    for file in tracked(files, "parts", total=len(files)) if has_parts and not arguments.quiet else files:
        matches, texts = search(file)
        for kept, row in zip(best, matches, strict=True):
            keep_best(kept, (match._replace(row=count + match.row) for match in row), arguments.top)
        count += texts
    return names, best, count


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of vectors in the order of their texts, and the settings that a folder of part files has."""
    from fasttfm.inference.part_files import PartFolder

    if not path.is_dir():
        return [path], {}
    folder = PartFolder.opened(path)
    stated = {name: folder.settings.get(name) for name in ("pooling", "layers", "dimensions")}
    settings = {name: str(value) for name, value in stated.items() if value is not None}
    return [folder.path(number) for number in folder.numbers()], settings


def _vector_search(arguments: argparse.Namespace, first: Path, settings: dict[str, str], progress: bool) -> Opened:
    """The search in files like the first one, of vectors of texts, of chunks or of tokens."""
    from fasttfm.tasks.search import search, search_texts
    from fasttfm.tasks.token_search import search_tokens
    from fasttfm.tasks.vector_files import VectorFile

    vectors = VectorFile(first)
    kind = "texts" if vectors.offsets is None else "tokens"
    kind = kind if vectors.chunks is None else "chunks"
    if arguments.index is not None and (kind != "texts" or Path(arguments.vectors).is_dir()):
        got = "a folder of part files" if kind == "texts" else f"vectors of {kind}"
        raise ValueError(f"--index: expected a file of one vector for each text, got {got}")
    read_queries = _queries_of_tokens if kind == "tokens" else _queries
    queries: Any
    names, queries = read_queries(arguments, settings or vectors.settings)
    options: dict[str, Any] = {"device": device_of(arguments), "progress": progress}

    def search_file(path: Path) -> tuple[list[list[Any]], int]:
        vectors = VectorFile(path)
        if kind == "tokens":
            matches = search_tokens(vectors, queries, arguments.top, **options)
            return matches, 0 if vectors.offsets is None else len(vectors.offsets) - 1
        if kind == "chunks":
            matches = search_texts(vectors, queries, arguments.top, **options)
            return matches, 0 if vectors.chunks is None else len(vectors.chunks) - 1
        matches = _indexed(arguments, vectors, queries, progress) or search(vectors, queries, arguments.top, **options)
        return matches, vectors.count or 0

    return names, search_file


def _indexed(arguments: argparse.Namespace, vectors: Any, queries: Any, progress: bool) -> list[list[Any]] | None:
    """The matches of --index; None without it, and with a note where the search is exact."""
    from fasttfm.tasks.vector_index import search_index, why_exact

    if arguments.index is None:
        return None
    if reason := why_exact(vectors):
        print(f"note: --index: the search is exact: {reason}", file=sys.stderr)
        return None
    return search_index(vectors, queries, arguments.top, arguments.index, progress=progress)


def _queries_of_tokens(arguments: argparse.Namespace, settings: dict[str, str]) -> tuple[list[str], list[Any]]:
    """The queries' texts, or their numbers, and the vectors of their tokens."""
    from fasttfm.data.lines import data_error
    from fasttfm.tasks.vector_files import VectorFile

    if arguments.query_vectors is None:
        names = _texts_of_queries(arguments)
        return names, embedder_of(arguments).session.encode(names, output="multi-query")
    file = VectorFile(arguments.query_vectors)
    if file.offsets is None:
        raise data_error(file.path, "vectors of tokens, with the array 'offsets'", "vectors of texts")
    ends = file.offsets.tolist()
    queries = [file.rows(first, last) for first, last in itertools.pairwise(ends)]
    return [f"query {number}" for number in range(1, len(queries) + 1)], queries


def _queries(arguments: argparse.Namespace, settings: dict[str, str]) -> tuple[list[str], Any]:
    """The queries' texts, or their numbers, and their vectors."""
    import numpy as np

    from fasttfm.tasks.vector_files import VectorFile

    if arguments.query_vectors is not None:
        blocks = list(VectorFile(arguments.query_vectors).blocks(1 << 16))
        texts = [text for _, names in blocks for text in names or []]
        vectors = np.concatenate([block for block, _ in blocks])
        return texts or [f"query {number}" for number in range(1, len(vectors) + 1)], vectors
    texts = _texts_of_queries(arguments)
    for name in ("pooling", "layers"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, settings.get(name))
    if arguments.dimensions is None and "dimensions" in settings:
        arguments.dimensions = int(settings["dimensions"])
    return texts, np.stack(list(embedder_of(arguments, _prompt(arguments)).vectors(texts)))


def _texts_of_queries(arguments: argparse.Namespace) -> list[str]:
    from fasttfm.data.lines import DataError

    texts = [*arguments.query, *(read_texts([arguments.queries], "line") if arguments.queries else ())]
    if not texts:
        raise DataError(f"{arguments.queries}: expected queries, one per line, got none")
    return texts


def _prompt(arguments: argparse.Namespace) -> str | None:
    """The name of the prompt of queries, if the folder has one and the options name no other."""
    from fasttfm.inference.sentence_folder import read_sentence_folder

    has_prompt = arguments.prompt is not None or arguments.prompt_name is not None
    return "query" if not has_prompt and "query" in read_sentence_folder(arguments.model).prompts else None


def _sparse_search(arguments: argparse.Namespace, first: Path, settings: dict[str, str], progress: bool) -> Opened:
    """The search in files of sparse vectors."""
    from fasttfm.inference.sparse import SparseVectors
    from fasttfm.tasks.sparse_files import InvertedLists, read_sparse

    if arguments.query_vectors is not None:
        queries = read_sparse(arguments.query_vectors)
        names = [f"query {number}" for number in range(1, len(queries) + 1)]
    else:
        names = _texts_of_queries(arguments)
        embedder = embedder_of(arguments, _prompt(arguments), sparse=True)
        queries = SparseVectors.of(list(embedder.sparse_vectors(names)), embedder.session.network.sparse_width)

    def search_file(path: Path) -> tuple[list[list[Any]], int]:
        vectors = read_sparse(path)
        return InvertedLists(vectors).search(queries, arguments.top), len(vectors)

    return names, search_file


def _print(names: list[str], matches: list[list[Any]]) -> None:
    for name, row in zip(names, matches, strict=True):
        print(name)
        for match in row:
            text = "" if match.text is None else f"  {match.text}"
            print(f"  {match.score:6.3f}  {match.row + 1:>8,}{text}")


def _write(path: Path, names: list[str], matches: list[list[Any]]) -> None:
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        for line in _lines(names, matches):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _lines(names: list[str], matches: list[list[Any]]) -> Iterator[dict[str, Any]]:
    for name, row in zip(names, matches, strict=True):
        records = [{"index": match.row, "score": round(match.score, 6), "text": match.text} for match in row]
        yield {"query": name, "matches": records}
