"""Small training runs for the tests of fasttfm.train: texts, settings, and processes that start quickly.

Processes are forked from a server that has imported everything and computed nothing, so that they start within
milliseconds and can be killed at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # slow to import: once, in the server

from fasttfm import data
from fasttfm.models.families import FAMILIES
from fasttfm.train.checkpoints import Checkpoints  # noqa: F401 - for tests
from fasttfm.train.logs import MEASURED, read_rows
from fasttfm.train.pretrain import Summary, pretrain
from fasttfm.train.settings import (
    OptimizerSettings,
    PretrainSettings,
    RunSettings,
    ScheduleSettings,
    StepSettings,
)

with contextlib.suppress(ModuleNotFoundError):
    import matplotlib.pyplot  # noqa: F401 - the same
    import sklearn.metrics  # noqa: F401

# Processes import test modules by their names from the repository's root. It is last on the path, because its kernels/
# must not be taken for Hugging Face's package.
if (root := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(root)

_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2}
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
    "albert": {**_BERT, "embedding_size": 16},
    "electra": {**_BERT, "embedding_size": 16, "generator_size": 0.5},
    "gpt": _GPT,
    "gpt2": _GPT,
    "gpt3": {**_GPT, "local_window": 8},
    "modernbert": {**_BERT, "local_attention": 16},
    "eurobert": _BERT,
    "nomic_bert": _BERT,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
}


def write_texts(path: Path, documents: int = 40) -> Path:
    """Sentences of invented words, some of which often follow others, so that a model can learn them."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghiklmnoprstu", k=draw.randint(2, 6))) for _ in range(80)]
    texts = []
    for _ in range(documents):
        sentences = []
        for _ in range(draw.randint(4, 12)):
            first = draw.randrange(80)
            sentence = [words[(first + 3 * index) % 80] for index in range(draw.randint(4, 14))]
            sentences.append(" ".join(sentence).capitalize() + ".")
        texts.append("\n".join(sentences))
    path.write_text("\n\n".join(texts) + "\n")
    return path


def write_corpus(folder: Path) -> dict[str, Path]:
    """Texts and tokenizers of all kinds."""
    texts = write_texts(folder / "texts.txt")
    found = {"data": texts}
    for kind, size in (("wordpiece", 300), ("bpe", 400), ("unigram", 300)):
        tokenizer = data.train_tokenizer(kind, data.read_documents(texts), size)  # type: ignore[arg-type]
        tokenizer.save(folder / kind)
        found[kind] = folder / kind
    return found


def settings_of(corpus: dict[str, Path], family: str = "bert", *, steps: int = 8, **changes: Any) -> PretrainSettings:
    found = PretrainSettings(
        family,
        FAMILIES[family].sizes[0],
        ScheduleSettings(steps, warmup=2),
        OptimizerSettings(learning_rate=3e-3),
        StepSettings(),
        data=(str(corpus["data"]),),
        tokenizer=str(corpus[FAMILIES[family].tokenizer]),
        held_out=0.1,
        tokens_per_step=256,
        max_length=64,
        changes=SIZES[family],
    )
    return dataclasses.replace(found, **changes)


def run_of(output: Path, **changes: Any) -> RunSettings:
    options: dict[str, Any] = {"evaluation_batches": 2, "log_every": 1, "progress": False, "device": "cpu"}
    return RunSettings(output, **{**options, **changes})


def results(directory: Path) -> tuple[bytes, Any, list[dict[str, str]]]:
    """The results of a run that another one must reproduce: parameters, training state, rows without measured times."""
    latest = directory / "latest"
    weights = b"".join(path.read_bytes() for path in sorted(latest.rglob("*.safetensors")))
    rows = read_rows(directory / "log.csv")
    unmeasured = [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]
    return weights, torch.load(latest / "training_state.pt", weights_only=True), unmeasured


# ---- processes -------------------------------------------------------------------------------------------------------


_PRELOADED = [
    "train_runs",
    *("fasttfm.cli.embed", "fasttfm.cli.predict", "fasttfm.cli.pretrain"),
    *("fasttfm.tasks.embedding", "fasttfm.tasks.loading", "fasttfm.tasks.registry", "fasttfm.train.curves"),
]


def start(target: Callable[..., Any], *arguments: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_alone, args=(target, *arguments))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        process.start()  # and the server, the first time: before Python 3.13 it has not our sys.path
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if before is None else {"PYTHONPATH": before})
    return process


def _alone(target: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    target(*arguments)


def train(settings: PretrainSettings, run: RunSettings) -> Summary | None:
    return pretrain(settings, run)


def run_command(argv: list[Any], log: Path, delay: float | None = None) -> tuple[int, float]:
    """Runs ``fasttfm`` in a process, which is ended by SIGTERM after a delay. Returns its exit status, or minus the
    signal that ended it, and the seconds that it took. ``log`` gets what it prints."""
    begin = time.monotonic()
    process = start(_command, [str(each) for each in argv], log)
    process.join(delay)
    if delay is not None:
        process.terminate()
        process.join()
    return process.exitcode, time.monotonic() - begin


def _command(argv: list[str], log: Path) -> None:
    from fasttfm.cli.main import main

    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    raise SystemExit(main(argv))


def join(processes: list[Any]) -> None:
    for process in processes:
        process.join()
        assert process.exitcode == 0


def start_ranks(size: int, target: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The processes that torchrun would start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [start(_ranked, rank, size, port, target, *arguments) for rank in range(size)]


def _ranked(rank: int, size: int, port: int, target: Callable[..., Any], *arguments: Any) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in values.items()})
    target(*arguments)


# ---- curves over ranks -----------------------------------------------------------------------------------------------


def trained(ranks: int, settings: PretrainSettings, output: Path, **options: Any) -> None:
    """A run, or its continuation, under as many processes."""
    run = run_of(output, **{"checkpoint_every": 3, "evaluate_every": 3, "evaluation_batches": 3, **options})
    if ranks == 1:
        pretrain(settings, run)
        return
    join(start_ranks(ranks, train, settings, run))


_NUMBERS = ("loss", "gradient_norm", "validation_loss")


def curve(output: Path) -> list[list[float]]:
    rows = read_rows(output / "log.csv")
    return [[float(row[name] or "nan") for name in _NUMBERS] for row in rows]


def back_to(output: Path, step: int) -> None:
    """Leaves of a run what one that was killed after the checkpoint of this step would have left."""
    for path in output.glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)


def close(first: Path, second: Path) -> None:
    """Asserts that two runs have the same curve, up to rounding."""
    ours, theirs = curve(first), curve(second)
    assert len(ours) == len(theirs) > 0
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, rel=1e-5, nan_ok=True)
