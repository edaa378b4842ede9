"""How the loss of a GPT falls with its size, after the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fasttfm.models import GPT2Config, GPT2LMHeadModel
from fasttfm.models.objectives import CausalLM
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row, parameters


def run(lab: Lab) -> Iterator[Row]:
    sizes = ((1, 16), (2, 32)) if lab.quick else ((1, 32), (2, 64), (3, 96), (4, 128), (6, 192))
    for layers, width in sizes:
        torch.manual_seed(lab.seed)
        config = GPT2Config(
            vocab_size=lab.bpe.vocab_size, n_positions=128, n_embd=width, n_layer=layers, n_head=max(1, width // 32)
        )
        model = GPT2LMHeadModel(config)
        held_out = lab.pretrain(CausalLM(model), "causal", steps=400, tokenizer=lab.bpe, tokens=2048)
        tables = config.n_embd * (config.vocab_size + config.n_positions)
        yield {
            "size": f"{layers} x {width}",
            "layers_parameters": parameters(model) - tables,
            "parameters": parameters(model),
            "loss": held_out["causal_lm"],
        }


EXPERIMENT = Experiment(
    "model-size",
    "Model size and loss",
    "GPT-3 (Brown et al., 2020), figure 3.1; Kaplan et al. (2020), figure 1.",
    """The papers found that the loss falls as a power of the number of parameters outside the tables, over many orders
    of magnitude, if there are enough tokens. Here every model sees the same 800 thousand tokens, so the curve
    falls at first and flattens where the largest models would need more of them.""",
    run,
    label="size",
    plotted=("loss",),
    x="layers_parameters",
)
