"""Light-weight models: size, speed and score of a BERT, and of the DistilBERT, TinyBERT and ALBERT in its place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from fasttfm.inference.opening import base_of
from fasttfm.models import AlbertConfig, AlbertForMaskedLM, BertConfig, BertForMaskedLM
from fasttfm.models.objectives import MaskedLM
from fasttfm.tasks.distillation_recipes import DistilBertRecipe, TinyBertRecipe, encode
from fasttfm.tasks.distillation_runs import CorpusRun, distilbert_student, tinybert_student
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row, parameters
from fasttfm.tasks.finetuning import FinetuneSettings
from fasttfm.tasks.rates import Rates


def run(lab: Lab) -> Iterator[Row]:
    torch.manual_seed(lab.seed)
    teacher = BertForMaskedLM(BertConfig(**lab.sizes))
    lab.pretrain(MaskedLM(teacher), "single", steps=1000)
    yield _row(lab, "BERT, the teacher", teacher)
    student = distilbert_student(teacher)
    _distilled(lab, DistilBertRecipe(student, teacher))
    yield _row(lab, "DistilBERT", student)
    student = tinybert_student(base_of(teacher))
    _distilled(lab, TinyBertRecipe(student, base_of(teacher)))
    yield _row(lab, "TinyBERT", student)
    albert = AlbertForMaskedLM(AlbertConfig(**lab.sizes, embedding_size=lab.sizes["hidden_size"] // 4))
    lab.pretrain(MaskedLM(albert), "single", steps=1000)
    yield _row(lab, "ALBERT", albert)


def _distilled(lab: Lab, recipe: Any) -> None:
    stream, _ = lab.batches(lab.wordpiece, "single")
    settings = FinetuneSettings(rates=Rates(1e-3), seed=lab.seed)
    CorpusRun(recipe, stream, settings, lab.steps(600)).run(lambda results: None)


def _row(lab: Lab, name: str, model: Any) -> Row:
    _, batches = lab.batches(lab.wordpiece, "single")
    base = base_of(model)
    return {
        "model": name,
        "parameters": parameters(base),
        "tokens_per_second": round(_speed(base, batches[0])),
        "classify_accuracy": lab.score(model, "classify"),
        "pair_accuracy": lab.score(model, "pair"),
    }


@torch.no_grad()
def _speed(model: Any, batch: Any) -> float:
    """Tokens per second of the encoder in inference, from the median time of 7 runs."""
    model.eval()
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        encode(model, batch)
        times.append(time.perf_counter() - begin)
    return float(batch.tokens) / statistics.median(times)


EXPERIMENT = Experiment(
    "lightweight",
    "Light-weight models: size, speed, score",
    "DistilBERT (Sanh et al., 2019), tables 1 and 3; TinyBERT (Jiao et al., 2020), table 1; ALBERT (Lan et al., 2019).",
    """The papers report for BERT-base's students: DistilBERT has 40% fewer parameters, is 60% faster and keeps 97% of
    the score on GLUE; TinyBERT with 4 layers is 7.5 times smaller, 9.4 times faster and keeps 96.8%; ALBERT-base has a
    ninth of the parameters, is as slow as BERT because it computes as many layers, and loses 2 points. Here DistilBERT
    has half of its teacher's layers, so it should be about twice as fast, TinyBERT (half as deep and half as wide) the
    fastest, and ALBERT, with as many layers, no faster than the teacher. Scores after trainings this short depend on
    the seed.""",
    run,
    label="model",
    plotted=("parameters", "tokens_per_second", "classify_accuracy", "pair_accuracy"),
)
