"""What a second pre-training task adds to an ALBERT's masked LM: none, next sentence or sentence order."""

from __future__ import annotations

from collections.abc import Iterator

from fasttfm.models import AlbertConfig, AlbertForPreTraining
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row
from fasttfm.tasks.experiments.sentence_pairs import PLOTTED, compared


def run(lab: Lab) -> Iterator[Row]:
    return compared(lab, lambda: AlbertForPreTraining(AlbertConfig(**lab.sizes)))


EXPERIMENT = Experiment(
    "sentence-order",
    "ALBERT: none, next sentence or sentence order",
    "ALBERT (Lan et al., 2019), table 5.",
    """In the paper, next sentence prediction does not help a model to order sentences (52.0%), while the order of
    sentences helps it to recognise the next one (78.9%), and adds about a point to tasks with several sentences. The
    trainings here are short: expect sentence losses near ln 2 = 0.69, which is that of a guess, and differences between
    the accuracies of a few points that another seed may turn around.""",
    run,
    label="objective",
    plotted=PLOTTED,
)
