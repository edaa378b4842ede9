"""Fine-tuning against transformers' Trainer with the same recipe: scores over several seeds, and time.

    fasttfm pretrain bert --size mini --steps 300 --output run
    python benchmarks/finetuning.py --model run/latest
    OMP_NUM_THREADS=2 python benchmarks/finetuning.py --model run/latest --device cpu --out benchmarks/results

Both sides start from the same checkpoint and train on the same token ids of the shipped samples (or ``--data``, a
folder with one folder for each task). The recipe is AdamW with the same learning rate, weight decay, epsilon and
clipping, a linear schedule with 10% warmup, batches of 32 examples in random order, dropout, the dev set scored after
each epoch, and the model of the last epoch. Trainer pads its batches to their longest sequence. The two sides
alternate, seed by seed. A time is that of training and evaluation, without loading and tokenizing; the ratio of CPU
seconds is printed too, because it is less affected by other processes. Scores agree if the means differ by at most
twice the standard deviation of the difference of the two means.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fasttfm import __version__, tasks
from fasttfm.bench.timing import device_name, file_stem
from fasttfm.models.family import Head
from fasttfm.tasks.inputs import Feature, by_count
from fasttfm.tasks.registry import TASKS
from fasttfm.tasks.task import Task
from fasttfm.train import StepSettings

CLASSES = {
    Head.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Head.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
}
NAMES = tuple(name for name, task in TASKS.items() if task.head in CLASSES)
Measured = tuple[float, float, float]  # the score, wall-clock seconds, CPU seconds
COLUMNS = (
    *(
        "task",
        "side",
        "score",
        "mean",
        "standard_deviation",
        "seconds_p50",
        "time_ratio",
        "cpu_ratio",
        "agree",
        "seeds",
        "epochs",
    ),
    *("learning_rate", "model", "device", "torch_version", "transformers_version", "fasttfm_version"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint with its tokenizer")
    parser.add_argument("--tasks", nargs="+", choices=NAMES, default=NAMES[:3])
    parser.add_argument("--data", type=Path, help="a folder with one folder for each task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a folder for a CSV file")
    settings = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    for name in settings.tasks:
        rows += compare(name, settings)
    if settings.out is not None:
        path = settings.out / f"{file_stem(torch.device(settings.device))}-finetuning.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def compare(name: str, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains both sides with every seed and prints a line; rows for the table."""
    examples = tasks.read_examples(name, None if settings.data is None else settings.data / name)
    sides = {"fasttfm": ours, "transformers": theirs}
    scores: dict[str, list[float]] = {side: [] for side in sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    for seed in range(settings.seeds):
        for side in sorted(sides, reverse=bool(seed % 2)):
            torch.manual_seed(seed)
            model, task = tasks.prepare(name, settings.model, examples.train, max_length=settings.max_length)
            score, elapsed, used = sides[side](model, task, examples, seed, settings)
            for values, value in ((scores, score), (seconds, elapsed), (processor, used)):
                values[side].append(value)
            what = f"{task.main_score} {score:.3f}, {elapsed:.1f} s, {used:.1f} s of processors"
            print(f"  {name} seed {seed} {side}: {what}", flush=True)
    means = {side: statistics.fmean(values) for side, values in scores.items()}
    spreads = {side: statistics.stdev(values) if len(values) > 1 else 0.0 for side, values in scores.items()}
    spread = 2 * math.sqrt(sum(deviation**2 for deviation in spreads.values()) / settings.seeds)
    difference = abs(means["fasttfm"] - means["transformers"])
    times = {side: statistics.median(values) for side, values in seconds.items()}
    ratio = times["fasttfm"] / times["transformers"]
    cpu_ratio = statistics.median(processor["fasttfm"]) / statistics.median(processor["transformers"])
    parts = ", ".join(f"{side} {means[side]:.3f} +- {spreads[side]:.3f} in {times[side]:.1f} s" for side in sides)
    agree = difference <= spread
    ratios = f"time ratio {ratio:.2f}, of processor seconds {cpu_ratio:.2f}"
    print(f"{name:9} {task.main_score}: {parts}; {ratios}; {'agree' if agree else 'DIFFER'}", flush=True)
    shared = {
        "task": name,
        "score": task.main_score,
        "agree": agree,
        "time_ratio": round(ratio, 3),
        "cpu_ratio": round(cpu_ratio, 3),
        "seeds": settings.seeds,
        "epochs": settings.epochs,
        "learning_rate": settings.learning_rate,
        "model": f"{model.config.model_type}, {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M",
        "device": device_name(torch.device(settings.device)),
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "fasttfm_version": __version__,
    }
    measured = {side: {"mean": round(means[side], 4), "standard_deviation": round(spreads[side], 4)} for side in sides}
    return [{**shared, "side": side, **measured[side], "seconds_p50": round(times[side], 2)} for side in sides]


class Clock:
    """Wall-clock seconds, and CPU seconds of the process."""

    def __init__(self) -> None:
        self._begun, self._used = time.perf_counter(), time.process_time()

    def passed(self) -> tuple[float, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self._begun, time.process_time() - self._used


# ---- the sides -------------------------------------------------------------------------------------------------------


def ours(model: Any, task: Task, examples: Any, seed: int, settings: argparse.Namespace) -> Measured:
    precision = "bfloat16" if settings.device == "cuda" else "float32"
    recipe = tasks.FinetuneSettings(
        rates=tasks.Rates(settings.learning_rate),
        epochs=settings.epochs,
        seed=seed,
        step=StepSettings(precision=precision),
    )
    work = tasks.FineTuning(model.to(settings.device), task, examples.train, recipe)
    features = task.features(examples.dev)
    scores: list[float] = []

    def evaluate(_: int) -> None:
        predictions = tasks.predict(model, task, examples.dev, features=features, precision=precision)
        scores.append(task.scores(examples.dev, predictions)[task.main_score])

    clock = Clock()
    work.run(lambda results: None, evaluate)
    return scores[-1], *clock.passed()


def theirs(model: Any, task: Task, examples: Any, seed: int, settings: argparse.Namespace) -> Measured:
    """Trainer with transformers' model, which starts with the same head."""
    train, dev = task.features(examples.train), task.features(examples.dev)
    with tempfile.TemporaryDirectory() as folder:
        tasks.save(model, task, Path(folder))
        module = getattr(transformers, CLASSES[task.head]).from_pretrained(folder)
        scores: list[float] = []

        class Scores(transformers.TrainerCallback):
            def on_epoch_end(self, *_: Any, **__: Any) -> None:
                scores.append(score(module, task, examples.dev, dev, settings.device))
                module.train()

        arguments = transformers.TrainingArguments(
            folder,
            learning_rate=settings.learning_rate,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=32,
            warmup_steps=0.1,  # a fraction of all steps
            weight_decay=0.01,
            adam_epsilon=1e-6,
            max_grad_norm=1.0,
            seed=seed,
            use_cpu=settings.device == "cpu",
            bf16=settings.device == "cuda",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = transformers.Trainer(
            module,
            arguments,
            train_dataset=train,
            data_collator=lambda sequences: padded(task, sequences),
            callbacks=[Scores()],
        )
        clock = Clock()
        trainer.train()
        return scores[-1], *clock.passed()


def padded(task: Task, features: Sequence[Feature]) -> dict[str, torch.Tensor]:
    """A batch for transformers, padded to the longest sequence."""

    def rows(values: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in values]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)

    batch = task.batch(features)
    sequences = [feature.sequences[0] for feature in features]
    tensors = {
        "input_ids": rows([sequence.ids for sequence in sequences], task.language.tokenizer.special.pad or 0),
        "attention_mask": rows([[1] * len(sequence.ids) for sequence in sequences], 0),
        "labels": batch.targets["labels"],
    }
    if batch.token_type_ids is not None:
        tensors["token_type_ids"] = rows([sequence.segments for sequence in sequences], 0)
    if len(tensors["labels"]) == batch.tokens:  # a label for each token
        pieces = batch.targets["labels"].split(batch.cu_seqlens.diff().tolist())
        tensors["labels"] = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=-100)
    return tensors


@torch.no_grad()
def score(module: Any, task: Task, examples: Sequence[Any], features: Sequence[Feature], device: str) -> float:
    """The dev score of transformers' model, evaluated in Trainer's batches."""
    module.eval()
    read: list[Any] = []
    for group in by_count(features, 32):
        inputs = {name: value.to(device) for name, value in padded(task, group).items() if name != "labels"}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = module(**inputs).logits
        logits = logits[inputs["attention_mask"].bool()] if logits.dim() == 3 else logits
        read += task.read(task.batch(group), logits)
    return task.scores(examples, task.predictions(examples, features, read))[task.main_score]


if __name__ == "__main__":
    main()
