"""``fasttfm <command>``, also ``python -m fasttfm <command>``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from fasttfm._version import __version__

# Command -> the module that adds its arguments (add_parser) and does its work (run).
_COMMANDS = {
    "info": "fasttfm.info",
    "bench": "fasttfm.bench_command",
    "pretrain": "fasttfm.pretrain_command",
    "finetune": "fasttfm.finetune_command",
    "embed": "fasttfm.embed_command",
    "distill": "fasttfm.distill_command",
    "generate": "fasttfm.generate_command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. A wrong argument exits with 2 and a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="fasttfm", description="Fused transformer ops, modules and models.")
    parser.add_argument("--version", action="version", version=f"fasttfm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    modules = {name: importlib.import_module(module) for name, module in _COMMANDS.items()}
    for module in modules.values():
        module.add_parser(commands)
    parsed = parser.parse_args(arguments)
    status: int = modules[parsed.command].run(parsed)
    return status
