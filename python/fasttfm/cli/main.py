"""``fasttfm <command>``, also ``python -m fasttfm <command>``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fasttfm._version import __version__
from fasttfm.cli.options import Formatter, in_words

# Command -> the module that adds its arguments (add_parser) and does its work (run).
COMMANDS = {
    "info": "fasttfm.cli.info",
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
    or directory that cannot be read or written with 1, and an interruption with 130."""
    arguments = sys.argv[1:] if arguments is None else arguments
    named = [name for name in arguments[:1] if name in COMMANDS]  # only its module is imported
    modules = {name: importlib.import_module(COMMANDS[name]) for name in named or COMMANDS}
    parser, commands = parser_of(modules)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        refuse_unknown(commands[parsed.command], unknown)
    try:
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


def refuse_unknown(command: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Exits with the usage of the command, and with the option that comes close to the first unknown one."""
    known = [name for action in command._actions for name in action.option_strings]
    close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
