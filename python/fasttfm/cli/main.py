"""``fasttfm <command>``, also ``python -m fasttfm <command>``."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fasttfm._version import __version__
from fasttfm.cli.options import Formatter, in_words

# Command -> the module that adds its arguments (add_parser) and does its work (run).
COMMANDS = {
    "info": "fasttfm.cli.info",
    "doctor": "fasttfm.cli.doctor",
    "bench": "fasttfm.cli.bench",
    "pretrain": "fasttfm.cli.pretrain",
    "finetune": "fasttfm.cli.finetune",
    "glue": "fasttfm.cli.glue",
    "distill": "fasttfm.cli.distill",
    "predict": "fasttfm.cli.predict",
    "embed": "fasttfm.cli.embed",
    "search": "fasttfm.cli.search",
    "generate": "fasttfm.cli.generate",
    "serve": "fasttfm.cli.serve",
    "prompt-eval": "fasttfm.cli.prompt_eval",
    "fill-mask": "fasttfm.cli.fill_mask",
    "score": "fasttfm.cli.score",
    "show": "fasttfm.cli.show",
    "experiment": "fasttfm.cli.experiment",
    "transe": "fasttfm.cli.transe",
    "pretrain-knowledge": "fasttfm.cli.pretrain_knowledge",
    "explain": "fasttfm.cli.explain",
}
_EXAMPLES = """
examples:
  fasttfm info                                              is everything installed, and does it run fast here?
  fasttfm pretrain gpt2 --set n_embd=128 n_layer=2 n_head=4 --output run    pre-train a tiny GPT-2 on the shipped text
  fasttfm generate --model run --prompt "The state of" --temperature 0.8    continue a text with it
  fasttfm finetune --task classify --model bert-base-uncased --data reviews/ --output classifier
  fasttfm predict --model classifier --data new.txt --output labels.csv

'fasttfm COMMAND --help' shows the options of a command, with examples.
"""
_COMMON = f"""fasttfm {__version__}: trains, evaluates and uses transformers on fused kernels

  fasttfm doctor                                                check the installation, and what to do
  fasttfm embed --model DIR --data texts.txt --output vectors.npy      vectors of texts
  fasttfm finetune --task classify --model DIR --data reviews.csv      train a classifier on a table
  fasttfm predict --model DIR --data new.txt --output labels.csv       use it
  fasttfm pretrain gpt2 --data corpus/ --output run                    pre-train a model

DIR is a checkpoint directory or a hub id such as bert-base-uncased. 'fasttfm --help' lists all commands,
'fasttfm COMMAND --help' shows the options of one."""


def parser_of(modules: Mapping[str, Any]) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The command line with the commands of these modules, and the parser of each command."""
    parser = argparse.ArgumentParser(
        prog="fasttfm",
        description="Trains, evaluates and uses transformers on fused kernels.",
        epilog=_EXAMPLES,
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"fasttfm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in modules.values():
        module.add_parser(commands)
    return parser, commands.choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. A wrong argument exits with 2 and a sentence on stderr; a file
    or directory that cannot be read or written with 1, an interruption with 130, and SIGTERM with 143."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        print(_COMMON)
        return 0
    named = [name for name in arguments[:1] if name in COMMANDS]  # only its module is imported
    modules = {name: importlib.import_module(COMMANDS[name]) for name in named or COMMANDS}
    parser, commands = parser_of(modules)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        refuse_unknown(commands[parsed.command], unknown)
    try:
        with _exit_on_sigterm():
            status: int = modules[parsed.command].run(parsed)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"fasttfm {parsed.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # for example of head, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"fasttfm {parsed.command}: {in_words(error)}", file=sys.stderr)
        return 1
    return status


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that temporary files are removed. A second one ends the process at once."""

    def leave(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def refuse_unknown(command: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Exits with the usage of the command, and with the option that comes close to the first unknown one."""
    known = [name for action in command._actions for name in action.option_strings]
    close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
