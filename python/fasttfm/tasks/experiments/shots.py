"""Number of examples in the prompt and accuracy, of GPTs that are trained here."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.models import GPT2Config, GPT2LMHeadModel
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row

SYMBOLS, CLASSES = 20, 16  # of the task: each sequence assigns random classes to symbols
SHOTS = (0, 1, 2, 4, 8, 12)
PAIRS = 16


def sequences(count: int, generator: torch.Generator, *, repeats: int = 4) -> Tensor:
    """Token ids [count, 2 * PAIRS]: a symbol, its class, the next symbol, ... Only ``repeats`` symbols occur in a
    sequence, so that a class can be told by an earlier pair of the same symbol."""
    symbols = torch.rand(count, SYMBOLS, generator=generator, dtype=torch.float32, device="cpu").argsort(-1)[
        :, :repeats
    ]
    classes = torch.randint(CLASSES, (count, repeats), generator=generator, device="cpu") + SYMBOLS
    chosen = torch.randint(repeats, (count, PAIRS), generator=generator, device="cpu")
    return torch.stack([symbols.gather(1, chosen), classes.gather(1, chosen)], -1).flatten(1)


def run(lab: Lab) -> Iterator[Row]:
    for layers, width in ((1, 16),) if lab.quick else ((1, 64), (2, 64), (3, 64)):
        torch.manual_seed(lab.seed)
        config = GPT2Config(
            vocab_size=SYMBOLS + CLASSES,
            n_positions=2 * PAIRS,
            n_embd=width,
            n_layer=layers,
            n_head=2,
            initializer_range=0.1,  # with GPT-2's 0.02 a model this narrow may learn nothing
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        model = _trained(GPT2LMHeadModel(config), lab)
        for shots, accuracy in _accuracies(model, lab):
            yield {"model": f"{layers} x {width}", "shots": shots, "accuracy": accuracy}


def _trained(model: GPT2LMHeadModel, lab: Lab) -> GPT2LMHeadModel:
    generator = torch.Generator("cpu").manual_seed(lab.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(lab.steps(4000)):
        ids = sequences(32, generator)
        logits = model(ids).logits[:, 0::2][:, :PAIRS]  # at symbols: the class follows
        optimizer.zero_grad()
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1::2].flatten()).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def _accuracies(model: GPT2LMHeadModel, lab: Lab) -> Iterator[tuple[int, float]]:
    """After this many pairs, whether or not the symbol that is asked for is among them."""
    ids = sequences(32 if lab.quick else 1000, torch.Generator("cpu").manual_seed(lab.seed + 1))
    predicted = model(ids).logits[:, 0::2].argmax(-1)
    right = (predicted == ids[:, 1::2]).float().mean(0)
    for shots in SHOTS:
        yield shots, float(right[shots])


EXPERIMENT = Experiment(
    "shots",
    "Examples in the prompt and accuracy",
    "GPT-3 (Brown et al., 2020), figure 1.2.",
    """GPT-3 learns from the examples in its prompt: accuracy rises with their number, and the rise is steeper for
    larger models. A GPT that is trained on text for minutes does not, so these are trained on the skill itself: pairs
    of a symbol and a class, which are random in every sequence. Without an example a guess is right once in sixteen;
    with each example more symbols have been seen. A model of one layer cannot look for an earlier pair and copy what
    followed it (Olsson et al., 2022). It learns which classes occur in the sequence, and should stay near 0.6; a
    deeper one that finds this skill in time should rise above 0.7. When in its training a model finds it depends on the
    seed; one that does not stays near 0.5.""",
    run,
    label="model",
    plotted=("accuracy",),
    x="shots",
    lines="model",
)
