"""``fasttfm score``: computes how likely texts are under a language model.

  fasttfm score --model DIR --text "The state of the union is strong."
  fasttfm score --model DIR --text "The capital of France is" --continuation " Paris"
  fasttfm score --model RUN --data texts.txt --output scores.csv

A causal model computes the log-likelihood and perplexity of a text: each token but the first is predicted from those
before it. A masked model computes the pseudo-log-likelihood: each token is masked and predicted from all others. With a
continuation, only its tokens are predicted, and their joint probability is printed. Lines of a .jsonl file may have
their own continuation (fields "text" and "continuation").
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

from fasttfm.cli.fill_mask import add_language_model_options, language_model_of, texts_of, write_records
from fasttfm.cli.options import Formatter, exit_on_user_error


def add_parser(subparsers: Any) -> None:
    """Adds the ``score`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "score", help="compute perplexities and likelihoods of texts", description=__doc__, formatter_class=Formatter
    )
    add_language_model_options(parser)
    parser.add_argument(
        "--continuation", metavar="TEXT", help="score this continuation of each text; include its leading space"
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="causal models: tokens between the starts of two windows over a text that is longer than the model's "
        "positions (default: half of them)",
    )
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        from fasttfm.data.lines import DataError
        from fasttfm.tasks.language_models import TextScore

        read = texts_of(arguments)

        def texts_and_continuations() -> Iterator[tuple[str, str | None]]:
            for row in read:
                continuation = row.get("continuation", arguments.continuation)
                if not isinstance(continuation, str | None):
                    raise DataError(f"{arguments.data}: continuation: expected a text, got {continuation!r:.60}")
                yield row["text"], continuation

        texts, again = itertools.tee(texts_and_continuations())
        model = language_model_of(arguments, masked=False)
        scores = model.score(
            (text if continuation is None else (text, continuation) for text, continuation in texts),
            stride=arguments.stride,
        )
        prefix = "" if model.causal else "pseudo_"
        tokens, total = 0, 0.0

        def records() -> Iterator[dict[str, Any]]:
            nonlocal tokens, total
            for (text, continuation), score in zip(again, scores, strict=True):
                tokens, total = tokens + score.tokens, total + score.log_likelihood
                yield {
                    "text": text,
                    **({} if continuation is None else {"continuation": continuation}),
                    "tokens": score.tokens,
                    f"{prefix}log_likelihood": score.log_likelihood,
                    f"{prefix}perplexity": score.perplexity,
                    **({} if continuation is None else {f"{prefix}probability": math.exp(score.log_likelihood)}),
                }

        count = write_records(arguments, model, records(), lambda record: [record], _line)
        if count > 1:
            whole = TextScore(tokens, total).perplexity
            said = "no token is predicted" if whole is None else f"{prefix.replace('_', '-')}perplexity {whole:.3f}"
            file = sys.stderr if arguments.output is None else sys.stdout
            print(f"all texts  {said} over {tokens:,} tokens", file=file)
    return 0


def _line(record: dict[str, Any]) -> str:
    parts = []
    for name, value in record.items():
        if name in ("text", "continuation") or value is None:
            continue
        parts.append(f"{name.replace('_', ' ')} {value if isinstance(value, int) else f'{value:.6g}'}")
    return f"{record['text']}{record.get('continuation', '')}\n  {', '.join(parts)}"
