"""ALBERT's four ways to share parameters between layers, for several widths of the embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fasttfm.models import AlbertConfig, AlbertForPreTraining
from fasttfm.models.albert import SHARED
from fasttfm.models.objectives import SentenceOrder
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row, parameters


def run(lab: Lab) -> Iterator[Row]:
    for width in (16,) if lab.quick else (32, 64, 128):
        for mode in SHARED:
            torch.manual_seed(lab.seed)
            config = AlbertConfig(**lab.sizes, embedding_size=width, parameter_sharing=mode, inner_group_num=1)
            model = AlbertForPreTraining(config)
            held_out = lab.pretrain(SentenceOrder(model), "sop", steps=600)
            yield {
                "sharing": mode,
                "embedding_size": width,
                "parameters": parameters(model),
                "masked_lm_loss": held_out["masked_lm"],
                "sentence_order_loss": held_out["sentence_order"],
            }


EXPERIMENT = Experiment(
    "sharing",
    "What layers share, and the width of the embeddings",
    "ALBERT (Lan et al., 2019), tables 3 and 4.",
    """In the paper, sharing everything costs ALBERT-base 1.5 points on average with embeddings of 128 columns, most of
    it by the feed-forward blocks; sharing only attention costs next to nothing; and embeddings of 128 columns are as
    good as wider ones where everything is shared. The few hundred steps here are too few to tell the ways of sharing
    apart: expect differences of a few hundredths that another seed may turn around, for very different numbers of
    parameters. Wider embeddings should lower the loss a little.""",
    run,
    label="embedding_size",
    plotted=("masked_lm_loss",),
    x="parameters",
    lines="sharing",
)
