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
    "sum of all and the embeddings": lambda states: torch.stack([*states]).sum(0),
}
FOLDS = 5


def run(lab: Lab) -> Iterator[Row]:
    torch.manual_seed(lab.seed)
    model = BertForMaskedLM(BertConfig(**{**lab.sizes, "num_hidden_layers": 4}))
    lab.pretrain(MaskedLM(model), "single", steps=500, tokens=2048)
    directory = lab.folder / "features-model"
    model.save_pretrained(directory)
    lab.wordpiece.save(directory)
    examples = read_examples("tag")
    sentences = [*examples.train, *examples.dev]
    sentences = sentences[:32] if lab.quick else sentences
    tagger, task = prepare("tag", directory, sentences, max_length=128)
    states, tags, folds = _states(tagger, task, sentences, lab.tokens_per_batch)
    outside = task.labels.index("O")
    for name, combined in COMBINATIONS.items():
        torch.manual_seed(lab.seed)
        features = combined(states)
        predicted = _cross_validated(features, tags, folds, len(task.labels), lab.steps(100))
        correct = int(((predicted == tags) & (tags != outside)).sum())
        yield {
            "layers": name,
            "width": features.shape[-1],
            "accuracy": float((predicted == tags).float().mean()),
            "f1": 2 * correct / int((predicted != outside).sum() + (tags != outside).sum()),
        }


@torch.no_grad()
def _states(
    model: nn.Module, task: object, examples: Sequence[object], tokens: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The hidden states [words, C] of the words' first tokens in every layer, the words' tags, and the folds of their
    sentences."""
    from fasttfm.tasks.labels import TagTask

    assert isinstance(task, TagTask)
    layers: list[list[Tensor]] = []
    tags, folds = [], []
    model.eval()
    for group in by_budget(task.features(examples), tokens):
        batch = task.batch(group)
        hidden = encode(model, batch, hidden_states=True).hidden_states  # type: ignore[arg-type]
        assert hidden is not None
        known = batch.targets["labels"] != IGNORED
        sentences = torch.tensor([feature.example for feature in group], dtype=torch.int64, device="cpu")
        layers.append([state[known] for state in hidden])
        tags.append(batch.targets["labels"][known])
        folds.append(sentences.repeat_interleave(batch.cu_seqlens.diff())[known] % FOLDS)
    return [torch.cat(rows) for rows in zip(*layers, strict=True)], torch.cat(tags), torch.cat(folds)


def _cross_validated(features: Tensor, tags: Tensor, folds: Tensor, classes: int, steps: int) -> Tensor:
    """The predicted tag of each word, by a linear classifier that is trained on the other folds."""
    predicted = torch.empty_like(tags)
    for fold in range(FOLDS):
        train = folds != fold
        scaled = (features - features[train].mean(0)) / (features[train].std(0) + 1e-5)
        predicted[~train] = _trained(scaled[train], tags[train], classes, steps)(scaled[~train]).argmax(-1)
    return predicted


def _trained(features: Tensor, tags: Tensor, classes: int, steps: int) -> nn.Module:
    """A linear classifier with an L2 penalty, trained on all words at once."""
    head = nn.Linear(features.shape[-1], classes)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (functional.cross_entropy(head(features), tags) + 1e-3 * head.weight.square().sum()).backward()
        optimizer.step()
    return head


EXPERIMENT = Experiment(
    "layer-features",
    "Layers of a frozen BERT as features of a tagger",
    "BERT (Devlin et al., 2018), table 7.",
    """In the paper the best features on CoNLL-2003 are the concatenation of the last four layers (F1 96.1), 0.3 below
    fine-tuning; the second to last layer (95.6) is better than the last (94.9), and the embeddings are far off (91.0).
    Here a linear classifier reads the states of a small BERT that was pre-trained for a minute, in a cross-validation
    over five parts of 300 sentences; F1 counts words of entities. The concatenation, with the most columns, should
    be the best. The embeddings are not far off here but as good as a single layer, because a BERT this small knows
    little more than its words; differences of two points between single layers are within the noise.""",
    run,
    label="layers",
    plotted=("accuracy", "f1"),
)
