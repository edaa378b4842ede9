"""``python -m fasttfm.testing.seams [SEAM [ENTRY POINT]] [--device cuda]``: runs the seams whose names start with
SEAM; in a process in which nothing has run before, as "first use in a capture" needs it."""

from __future__ import annotations

import argparse

import torch

from fasttfm.testing.seams.registry import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttfm.testing.seams", description=__doc__)
    parser.add_argument("seam", nargs="?", default="", help="the start of the names of seams")
    parser.add_argument("entry", nargs="?", default=None, help="the name of one entry point")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    failures = run(
        options.device,
        lambda seam, entry: seam.startswith(options.seam) and options.entry in (None, entry),
    )
    print("\n".join([*failures, f"{len(failures)} failures"]))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
