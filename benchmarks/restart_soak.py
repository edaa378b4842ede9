"""Kills ranks of a training under torchrun at random steps, and compares the curve with that of an undisturbed run.

    python benchmarks/restart_soak.py --kills 20

`torchrun --max-restarts` starts all ranks again when one has been killed (SIGKILL), and the run continues from its last
checkpoint. A kill comes a random number of milliseconds after a random number of steps since the last one, so that it
also hits evaluations and the writing of checkpoints. The exit status is 0 if the run comes to its end with as many
restarts as kills, with the curve of an undisturbed run of one process, up to --tolerance, and its last row.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fasttfm import data
from fasttfm.train.logs import read_rows

NUMBERS = ("loss", "gradient_norm", "validation_loss")
LIMIT = 600  # seconds without a new step


def command(arguments: argparse.Namespace, folder: Path, output: Path) -> list[str]:
    """``fasttfm pretrain`` of a small model, with a row for every step."""
    sizes = ["--size", "tiny", "--max-length", "64", "--tokens-per-step", "512", "--vocabulary", "1000"]
    steps = ["--steps", str(steps_of(arguments)), "--batches-per-step", str(arguments.ranks), "--log-every", "1"]
    every = [
        "--checkpoint-every",
        str(arguments.checkpoint_every),
        "--evaluate-every",
        "7",
        "--evaluation-batches",
        "4",
    ]
    places = ["--output", str(output), "--prepared", str(folder / "shards"), "--tokenizer", str(folder / "tokenizer")]
    kinds = ["--device", "cpu", "--checkpoints", arguments.checkpoints, "--quiet", "--no-compare"]
    return ["-m", "fasttfm", "pretrain", "bert", *sizes, *steps, *every, *places, *kinds]


def steps_of(arguments: argparse.Namespace) -> int:
    return int((arguments.kills + 1) * (arguments.most_steps + 10) + 20)  # a kill comes a few steps late


def step_of(output: Path) -> int:
    """The last step in the log."""
    rows = read_rows(output / "log.csv")
    return int(rows[-1]["step"]) if rows else 0


def rank_process(launcher: int, rank: int, restart: int) -> int | None:
    """The process id of a rank under torchrun after a number of restarts; None while it does not run."""
    expected = {f"RANK={rank}", f"TORCHELASTIC_RESTART_COUNT={restart}"}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"PPid:\s+(\d+)", (path / "status").read_text())
            if parent and int(parent[1]) == launcher and expected <= set((path / "environ").read_text().split("\0")):
                return int(path.name)
        except OSError:
            continue
    return None


def kill_at_random(arguments: argparse.Namespace, launcher: subprocess.Popen[bytes], output: Path) -> None:
    """Kills a rank again and again. Steps after the last checkpoint are repeated: their count begins there."""
    draw = random.Random(arguments.seed)
    for number in range(arguments.kills):
        rank, steps, delay = draw.randrange(arguments.ranks), draw.randint(1, arguments.most_steps), draw.random() / 20
        started, waited = time.time(), time.monotonic()
        while (process := rank_process(launcher.pid, rank, number)) is None:
            check(launcher, waited)
        begun = checkpoint_of(output)
        while changed_before(output, started) or step_of(output) < begun + steps:
            check(launcher, waited)
        time.sleep(delay)
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            raise SystemExit(f"kill {number + 1}: expected rank {rank} to run, got one that has ended") from None
        print(
            f"kill {number + 1}: rank {rank} after step {step_of(output)}, checkpoint {checkpoint_of(output)}",
            flush=True,
        )


def changed_before(output: Path, moment: float) -> bool:
    """Whether the log has not been written since a moment, a time of the system's clock."""
    path = output / "log.csv"
    return not path.exists() or path.stat().st_mtime < moment


def checkpoint_of(output: Path) -> int:
    names = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in output.glob("checkpoint-*")]
    return max((int(name[1]) for name in names if name), default=0)


def check(launcher: subprocess.Popen[bytes], since: float) -> None:
    if launcher.poll() is not None:
        raise SystemExit(f"torchrun ended before the last kill, with status {launcher.returncode}")
    if time.monotonic() - since > LIMIT:
        launcher.terminate()
        raise SystemExit(f"no new step within {LIMIT} s")
    time.sleep(0.01)


def difference(first: Path, second: Path) -> float:
    """The largest relative difference of two curves."""
    ours, theirs = read_rows(first / "log.csv"), read_rows(second / "log.csv")
    if [row["step"] for row in ours] != [row["step"] for row in theirs]:
        raise SystemExit(f"expected {len(theirs)} rows, one for each step, got {len(ours)}")
    pairs = [(float(a[name]), float(b[name])) for a, b in zip(ours, theirs, strict=True) for name in NUMBERS if b[name]]
    return max(abs(one - other) / abs(other) for one, other in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most-steps", type=int, default=12, help="the most steps between two kills")
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--checkpoints", choices=("whole", "sharded"), default="sharded")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = data.read_documents(data.shipped_corpus())
        data.train_tokenizer("wordpiece", texts, 1000).save(folder / "tokenizer")
        undisturbed, output = folder / "undisturbed", folder / "killed"
        subprocess.run([sys.executable, *command(arguments, folder, undisturbed)], check=True)
        elastic = ["--standalone", "--nproc-per-node", arguments.ranks, "--max-restarts", arguments.kills]
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *map(str, elastic),
            *command(arguments, folder, output),
        ]
        begun = time.monotonic()
        with (folder / "said").open("w") as said:
            launcher = subprocess.Popen(launch, stdout=said, stderr=said)
            try:
                kill_at_random(arguments, launcher, output)
                status = launcher.wait(LIMIT)
            except BaseException:
                launcher.kill()
                print((folder / "said").read_text(), file=sys.stderr)
                raise
        if status != 0:
            print((folder / "said").read_text(), file=sys.stderr)
            return status
        largest = difference(output, undisturbed)
        seconds = time.monotonic() - begun
    print(
        f"{arguments.kills} kills of {arguments.ranks} ranks, {steps_of(arguments)} steps in {seconds:.0f} s: "
        f"largest relative difference {largest:.1e}, tolerance {arguments.tolerance:.0e}"
    )
    return int(largest > arguments.tolerance)


if __name__ == "__main__":
    raise SystemExit(main())
