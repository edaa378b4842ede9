"""Feature-based tagging: which layers of a frozen BERT give a tagger the best features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm.models import BertConfig, BertForMaskedLM
from fasttfm.models.objectives import MaskedLM
from fasttfm.tasks.distillation_recipes import encode
from fasttfm.tasks.experiments.lab import Experiment, Lab, Row
from fasttfm.tasks.finetuning import prepare
from fasttfm.tasks.inputs import by_budget
from fasttfm.tasks.labels import IGNORED
from fasttfm.tasks.reading import read_examples

# Functions of the hidden states of the embeddings and of all layers.
COMBINATIONS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "embeddings": lambda states: states[0],
    "second to last": lambda states: states[-2],
    "last": lambda states: states[-1],
    "sum of the last four": lambda states: torch.stack([*states[-4:]]).sum(0),
    "concatenation of the last four": lambda states: torch.cat([*states[-4:]], -1),
    "sum of all": lambda states: torch.stack([*states[1:]]).sum(0),
}


def run(lab: Lab) -> Iterator[Row]:
    torch.manual_seed(lab.seed)
    model = BertForMaskedLM(BertConfig(**{**lab.sizes, "num_hidden_layers": 4}))
    lab.pretrain(MaskedLM(model), "single", steps=500)
    directory = lab.folder / "features-model"
    model.save_pretrained(directory)
    lab.wordpiece.save(directory)
    examples = read_examples("tag")
    train, dev = (part[:16] if lab.quick else part for part in (examples.train, examples.dev))
    tagger, task = prepare("tag", directory, train, max_length=128)
    states = [_states(tagger, task, part, lab.tokens_per_batch) for part in (train, dev)]
    for name, combined in COMBINATIONS.items():
        torch.manual_seed(lab.seed)
        head = _trained(combined(states[0][0]), states[0][1], len(task.labels), lab.steps(300))
        found = head(combined(states[1][0])).argmax(-1)
        wanted = states[1][1]
        inside = wanted != task.labels.index("O")
        yield {
            "layers": name,
            "width": combined(states[1][0]).shape[-1],
            "accuracy": float((found == wanted).float().mean()),
            "recall_of_entities": float((found == wanted)[inside].float().mean()),
        }


@torch.no_grad()
def _states(model: nn.Module, task: object, examples: Sequence[object], tokens: int) -> tuple[list[Tensor], Tensor]:
    """The hidden states [words, C] of the words' first tokens in every layer, and the words' tags."""
    from fasttfm.tasks.labels import TagTask

    assert isinstance(task, TagTask)
    layers: list[list[Tensor]] = []
    labels = []
    model.eval()
    for group in by_budget(task.features(examples), tokens):
        batch = task.batch(group)
        hidden = encode(model, batch, hidden_states=True).hidden_states  # type: ignore[arg-type]
        assert hidden is not None
        known = batch.targets["labels"] != IGNORED
        layers.append([state[known] for state in hidden])
        labels.append(batch.targets["labels"][known])
    return [torch.cat(rows) for rows in zip(*layers, strict=True)], torch.cat(labels)


def _trained(features: Tensor, labels: Tensor, classes: int, steps: int) -> nn.Module:
    """A linear classifier, trained on all words at once."""
    head = nn.Linear(features.shape[-1], classes)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(head(features), labels).backward()
        optimizer.step()
    return head


EXPERIMENT = Experiment(
    "layer-features",
    "Layers of a frozen BERT as features of a tagger",
    "BERT (Devlin et al., 2018), table 7.",
    """In the paper the best features on CoNLL-2003 are the concatenation of the last four layers (F1 96.1), 0.3 below
    fine-tuning; the second to last layer (95.6) is better than the last (94.9), and the embeddings are far off (91.0).
    Here a linear classifier reads the states of a small BERT that was pre-trained for a minute. The embeddings should
    be the worst and the concatenation, with the most columns, the best.""",
    run,
    label="layers",
    plotted=("accuracy", "recall_of_entities"),
)
