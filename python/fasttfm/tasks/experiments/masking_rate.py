"""The fraction of tokens that are masked, and what the model has learnt from it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fasttfm.data import Masking
from fasttfm.models import BertConfig, BertForMaskedLM
from fasttfm.models.objectives import MaskedLM
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row


def run(lab: Lab) -> Iterator[Row]:
    for rate in (0.15, 0.8) if lab.quick else (0.05, 0.15, 0.3, 0.45, 0.6, 0.8):
        torch.manual_seed(lab.seed)
        model = BertForMaskedLM(BertConfig(**lab.sizes))
        held_out = lab.pretrain(MaskedLM(model), "single", steps=600, masking=Masking(rate))
        yield {
            "rate": rate,
            "loss_at_15%": held_out["masked_lm"],
            "classify_accuracy": lab.score(model, "classify"),
            "pair_accuracy": lab.score(model, "pair"),
        }


EXPERIMENT = Experiment(
    "masking-rate",
    "How many tokens are masked in training",
    "Should You Mask 15% in Masked Language Modeling? (Wettig et al., 2023), figure 1 and table 1.",
    """BERT masks 15% of the tokens. More masked tokens are more predictions in a step, each from less context. For
    large models the paper found 40% better than 15%, and that 80% keeps 95% of the accuracy after fine-tuning. Here
    every model sees the same sequences and is validated with 15% of the tokens masked. These trainings are so short
    that the number of predictions matters more than the context: expect the loss to fall quickly up to 30% and a little
    further up to 80%. Accuracies after fine-tuning tend to be best at rates between; another seed may change them by
    several points.""",
    run,
    label="rate",
    plotted=("loss_at_15%", "classify_accuracy", "pair_accuracy"),
    x="rate",
)
