"""Sizes of BERT: the perplexity of masked tokens and the accuracy after fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fasttfm.models import BertConfig, BertForPreTraining
from fasttfm.models.objectives import NextSentence
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row, parameters


def run(lab: Lab) -> Iterator[Row]:
    sizes = ((1, 16, 1), (2, 32, 2)) if lab.quick else ((2, 64, 2), (2, 128, 4), (4, 128, 4), (4, 256, 4))
    for layers, width, heads in sizes:
        torch.manual_seed(lab.seed)
        changes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
        model = BertForPreTraining(BertConfig(**{**lab.sizes, **changes, "intermediate_size": 4 * width}))
        held_out = lab.pretrain(NextSentence(model), "nsp", steps=600)
        yield {
            "size": f"{layers} x {width}",
            "heads": heads,
            "parameters": parameters(model),
            "perplexity": math.exp(held_out["masked_lm"]),
            "classify_accuracy": lab.score(model, "classify"),
            "pair_accuracy": lab.score(model, "pair"),
        }


EXPERIMENT = Experiment(
    "bert-size",
    "The size of BERT",
    "BERT (Devlin et al., 2018), table 6.",
    """In the paper, from 3 layers of width 768 to 24 layers of width 1,024, the perplexity of masked tokens falls from
    5.84 to 3.23 and the accuracy on MNLI rises from 77.9 to 86.6: larger models are better even on tasks with few
    examples. Here all sizes see the same 600 thousand tokens, with the same learning rate. Expect the perplexity to
    fall with width, and less with depth, which needs longer trainings; accuracies on tasks this small may differ by a
    few points in any direction.""",
    run,
    label="size",
    plotted=("parameters", "perplexity", "classify_accuracy", "pair_accuracy"),
)
