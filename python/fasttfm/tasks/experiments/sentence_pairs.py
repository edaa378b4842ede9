"""What a second pre-training task adds to a BERT's masked LM: none, next sentence or sentence order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fasttfm.models import BertConfig, BertForPreTraining
from fasttfm.models.objectives import MaskedLM, NextSentence, Pretraining, SentenceOrder
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row


class NoSentences(MaskedLM):
    """Masked LM over the same pairs of sentences, whose relation is not predicted."""


def compared(lab: Lab, make_model: Callable[[], PretrainedModel]) -> Iterator[Row]:
    """A row for each objective, all of which train the same initial model."""
    objectives: dict[str, tuple[type[Pretraining], str]] = {
        "none": (NoSentences, "nsp"),
        "next sentence": (NextSentence, "nsp"),
        "sentence order": (SentenceOrder, "sop"),
    }
    for name, (objective, sequences) in objectives.items():
        torch.manual_seed(lab.seed)
        model = make_model()
        held_out = lab.pretrain(objective(model), sequences, steps=1000)
        yield {
            "objective": name,
            "masked_lm_loss": held_out["masked_lm"],
            "sentence_loss": held_out.get("next_sentence", held_out.get("sentence_order", float("nan"))),
            "pair_accuracy": lab.score(model, "pair"),
            "choice_accuracy": lab.score(model, "choice"),
        }


def run(lab: Lab) -> Iterator[Row]:
    return compared(lab, lambda: BertForPreTraining(BertConfig(**lab.sizes)))


PLOTTED = ("masked_lm_loss", "sentence_loss", "pair_accuracy", "choice_accuracy")
EXPERIMENT = Experiment(
    "sentence-pairs",
    "BERT: none, next sentence or sentence order",
    "RoBERTa (Liu et al., 2019), table 2; ALBERT (Lan et al., 2019), table 5.",
    """RoBERTa found that next sentence prediction does not help, ALBERT that sentence order does, by about a point on
    tasks with several sentences: telling two documents apart can be done by topic, while the order of two sentences
    needs coherence. The trainings here are short: expect sentence losses near ln 2 = 0.69, which is that of a guess,
    and differences between the accuracies of a few points that another seed may turn around.""",
    run,
    label="objective",
    plotted=PLOTTED,
)
