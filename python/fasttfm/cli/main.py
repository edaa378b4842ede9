"""``fasttfm <command>``, also ``python -m fasttfm <command>``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from fasttfm._version import __version__
from fasttfm.cli.options import in_words

# Command -> the module that adds its arguments (add_parser) and does its work (run).
_COMMANDS = {
    "info": "fasttfm.cli.info",
    "bench": "fasttfm.cli.bench",
    "pretrain": "fasttfm.cli.pretrain",
    "pretrain-knowledge": "fasttfm.cli.pretrain_knowledge",
    "finetune": "fasttfm.cli.finetune",
    "glue": "fasttfm.cli.glue",
    "explain": "fasttfm.cli.explain",
    "experiment": "fasttfm.cli.experiment",
    "predict": "fasttfm.cli.predict",
    "fill-mask": "fasttfm.cli.fill_mask",
    "score": "fasttfm.cli.score",
    "embed": "fasttfm.cli.embed",
    "search": "fasttfm.cli.search",
    "show": "fasttfm.cli.show",
    "distill": "fasttfm.cli.distill",
    "generate": "fasttfm.cli.generate",
    "transe": "fasttfm.cli.transe",
    "prompt-eval": "fasttfm.cli.prompt_eval",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. A wrong argument exits with 2 and a sentence on stderr; a file
    or directory that cannot be read or written with 1, and an interruption with 130."""
    parser = argparse.ArgumentParser(prog="fasttfm", description="Fused transformer ops, modules and models.")
    parser.add_argument("--version", action="version", version=f"fasttfm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    arguments = sys.argv[1:] if arguments is None else arguments
    named = [name for name in arguments[:1] if name in _COMMANDS]  # only its module is imported
    modules = {name: importlib.import_module(_COMMANDS[name]) for name in named or _COMMANDS}
    for module in modules.values():
        module.add_parser(commands)
    parsed = parser.parse_args(arguments)
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
