"""DistilBERT's and TinyBERT's terms against the formulas in plain torch, on padded batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fasttfm import models
from fasttfm.tasks.distillation_recipes import DistilBertRecipe, TinyBertRecipe, layer_map, soft_cross_entropy
from fasttfm.tasks.distillation_runs import JointRecipe, PredictionRecipe
from fasttfm.train import Objective, OptimizerSettings, Schedule, ScheduleSettings, Trainer, make_optimizer

V, LENGTHS = 71, [9, 4, 12]
SIZES = {
    "vocab_size": V,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}


@dataclass
class Batch:
    """The fields of a batch that the recipes read."""

    input_ids: Tensor
    token_type_ids: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    @property
    def predictions(self) -> int:
        return len(self.positions)

    def to(self, device: Any, non_blocking: bool = True) -> Batch:
        return self


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    ids = torch.randint(5, V, (total,), generator=generator)
    positions = torch.randperm(total, generator=generator)[:6].sort().values
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return Batch(ids, None, boundaries, 64, positions, torch.randint(5, V, (6,), generator=generator))


def bert(seed: int, cls: str = "BertForMaskedLM", **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = getattr(models, cls)(models.BertConfig(**{**SIZES, **changes})).eval()
    for parameter in model.parameters():  # so that nothing is nearly 0
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def padded(x: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(x.split(LENGTHS)), batch_first=True)


def whole(model: Any, inputs: Batch, **options: Any) -> Any:
    """The output of a model for the padded batch."""
    mask = padded(torch.ones(inputs.tokens, dtype=torch.long))
    return model(padded(inputs.input_ids), mask, **options)


def real(x: Tensor) -> Tensor:
    """The rows of a padded batch that are tokens."""
    return torch.cat([row[:length] for row, length in zip(x, LENGTHS, strict=True)])


def means(recipe: Any, inputs: Batch) -> list[float]:
    with torch.no_grad():
        return [float(total / count) for total, count in zip(recipe(inputs), recipe.counts(inputs), strict=True)]


# ---- DistilBERT ------------------------------------------------------------------------------------------------------


def test_a_student_starts_with_every_second_layer() -> None:
    teacher = bert(0)
    student = models.DistilBertForMaskedLM.from_teacher(teacher)
    theirs, ours = teacher.bert.encoder.layers, student.distilbert.encoder.layers
    assert len(ours) == 2
    for mine, index in zip(ours, (0, 2), strict=True):
        assert all(
            torch.equal(parameter, theirs[index].get_parameter(name)) for name, parameter in mine.named_parameters()
        )
        assert not torch.equal(mine.qkv.weight, theirs[1].qkv.weight)


@pytest.mark.parametrize("all_tokens", [True, False])
def test_distilberts_terms(all_tokens: bool) -> None:
    inputs, teacher, temperature = batch(), bert(0), 2.0
    student = models.DistilBertForMaskedLM.from_teacher(bert(1)).eval()
    weights = (5.0, 2.0, 1.0)
    recipe = DistilBertRecipe(student, teacher, temperature=temperature, weights=weights, all_tokens=all_tokens).eval()
    terms = means(recipe, inputs)

    ours, theirs = (whole(model, inputs, output_hidden_states=True) for model in (student, teacher))
    ours_real, other = real(ours.logits), real(theirs.logits)
    words = functional.cross_entropy(ours_real[inputs.positions], inputs.labels)
    rows = torch.arange(inputs.tokens) if all_tokens else inputs.positions
    soft = functional.kl_div(
        (ours_real[rows] / temperature).log_softmax(-1), (other[rows] / temperature).softmax(-1), reduction="batchmean"
    )
    states = [real(output.hidden_states[-1]) for output in (ours, theirs)]
    cosine = functional.cosine_embedding_loss(*states, torch.ones(inputs.tokens))
    expected = [(temperature**2 * soft).item(), words.item(), cosine.item()]
    assert (recipe.terms, recipe.weights) == (("soft_targets", "masked_lm", "cosine"), weights)
    assert terms == pytest.approx(expected, rel=1e-4)
    assert min(expected) > 0.01


def test_the_teacher_is_not_trained() -> None:
    teacher = bert(0)
    recipe = DistilBertRecipe(models.DistilBertForMaskedLM.from_teacher(teacher), teacher)
    sum(recipe(batch())).backward()
    assert not any(name.startswith("teacher") or "_teacher" in name for name, _ in recipe.named_parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in recipe.parameters())
    recipe.train()
    assert not teacher.training


def test_a_student_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the teacher's hidden_size 48, got 24"):
        DistilBertRecipe(bert(0, hidden_size=24), bert(0))


# ---- TinyBERT --------------------------------------------------------------------------------------------------------


def test_layers_are_matched_evenly() -> None:
    assert layer_map(4, 12) == [3, 6, 9, 12]
    assert layer_map(6, 12) == [2, 4, 6, 8, 10, 12]
    assert layer_map(3, 3) == [1, 2, 3]
    assert layer_map(2, 3) == [2, 3]
    with pytest.raises(ValueError, match="expected 1 to 3 layers"):
        layer_map(4, 3)


def scores(model: Any, layer: int, x: Tensor) -> Tensor:
    """The attention scores of a padded batch, from the checkpoint's own query and key."""
    tensors = model.checkpoint_tensors(dict(model.state_dict()))
    q, k = (
        functional.linear(
            x,
            tensors[f"encoder.layer.{layer}.attention.self.{part}.weight"],
            tensors[f"encoder.layer.{layer}.attention.self.{part}.bias"],
        ).unflatten(-1, (3, -1))
        for part in ("query", "key")
    )
    return torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5


@pytest.mark.parametrize("attention", ["scores", "weights"])
@pytest.mark.parametrize("width", [24, 48])
def test_tinyberts_terms(attention: str, width: int) -> None:
    inputs = batch()
    teacher = bert(0, "BertModel")
    student = bert(1, "BertModel", num_hidden_layers=2, hidden_size=width, intermediate_size=2 * width)
    recipe = TinyBertRecipe(student, teacher, attention=attention).eval()
    assert sorted(recipe.projections) == ([] if width == 48 else ["embeddings", "hidden"])
    terms = means(recipe, inputs)

    outputs = {"output_hidden_states": True, "output_attentions": True}
    ours, theirs = (whole(model, inputs, **outputs) for model in (student, teacher))

    def distance(name: str, m: int, g: int) -> Tensor:
        x = real(ours.hidden_states[m])
        if width != 48:
            x = x @ recipe.projections[name].weight.T
        return functional.mse_loss(x, real(theirs.hidden_states[g]))

    def maps(output: Any, model: Any, layer: int) -> Tensor:
        if attention == "weights":
            return output.attentions[layer]
        return scores(model, layer, output.hidden_states[layer])

    attentions = []
    for m, g in ((0, 1), (1, 3)):
        mine, target = maps(ours, student, m), maps(theirs, teacher, g)
        distance_of_maps = torch.zeros(())
        for row, length in enumerate(LENGTHS):
            pair = (maps[row, :, :length, :length] for maps in (mine, target))
            distance_of_maps = distance_of_maps + functional.mse_loss(*pair) * length / inputs.tokens
        attentions.append(distance_of_maps)
    expected = [distance("embeddings", 0, 0), *attentions, distance("hidden", 1, 2), distance("hidden", 2, 4)]
    assert recipe.terms == ("embeddings", "attention_1", "attention_2", "hidden_1", "hidden_2")
    assert terms == pytest.approx([term.item() for term in expected], rel=1e-4)
    assert min(expected) > 1e-5


def test_tinyberts_layers_and_predictions_in_one_loss() -> None:
    given, teacher = batch(), bert(0)
    student = bert(1, num_hidden_layers=2, hidden_size=24, intermediate_size=48)
    recipe = TinyBertRecipe(student, teacher, predictions=True).eval()
    assert recipe.terms[-1] == "soft_targets"
    ours_real, other = (real(whole(model, given, output_logits=True).logits) for model in (student, teacher))
    soft = functional.kl_div(ours_real.log_softmax(-1), other.softmax(-1), reduction="batchmean")
    layers = TinyBertRecipe(student, teacher, projections=recipe.projections.state_dict()).eval()
    assert means(recipe, given) == pytest.approx([*means(layers, given), soft.item()], rel=1e-4)
    sum(recipe(given)).backward()
    assert student.lm_head.decoder.bias.grad.abs().max() > 0


def test_a_tasks_layers_and_predictions_in_one_loss() -> None:
    torch.manual_seed(0)
    config = models.BertConfig(**SIZES, num_labels=3)
    student, teacher = (models.BertForSequenceClassification(config) for _ in range(2))
    layers, last = TinyBertRecipe(student, teacher), PredictionRecipe(student, teacher, Packed())  # type: ignore[arg-type]
    joint = JointRecipe(layers, last).eval()
    assert joint.terms == (*layers.terms, "predictions")
    inputs = batch()
    assert means(joint, inputs) == pytest.approx([*means(layers, inputs), *means(last, inputs)])
    assert [name for name, _ in joint.named_parameters() if "classifier" in name] == [
        "student.classifier.weight",
        "student.classifier.bias",
    ]


class Packed:
    """A task whose batches are those of a corpus."""

    def rows(self, inputs: Batch) -> int:
        return len(LENGTHS)

    def logits(self, model: Any, inputs: Batch) -> Tensor:
        layout: dict[str, Any] = {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": inputs.max_seqlen}
        logits: Tensor = model(inputs.input_ids, **layout).logits
        return logits


def test_attention_maps_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="expected as many attention heads as the teacher's 3, got 2"):
        TinyBertRecipe(bert(0, "BertModel", num_attention_heads=2), bert(0, "BertModel"))
    with pytest.raises(ValueError, match="layers: expected 4 numbers from 1 to 4, got"):
        TinyBertRecipe(bert(0, "BertModel"), bert(0, "BertModel"), layers=[1, 2])


def test_predictions_are_distilled_by_soft_cross_entropy() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 3)
    expected = functional.cross_entropy(student / 2, (teacher / 2).softmax(-1), reduction="sum")
    assert float(soft_cross_entropy(student, teacher, 2.0)) == pytest.approx(float(expected))


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["distilbert", "tinybert"])
def test_a_student_approaches_its_teacher(name: str) -> None:
    torch.manual_seed(0)
    recipe: Any
    if name == "distilbert":
        recipe = DistilBertRecipe(models.DistilBertForMaskedLM.from_teacher(bert(0)), bert(0))
    else:
        recipe = TinyBertRecipe(bert(1, "BertModel", num_hidden_layers=2, hidden_size=24), bert(0, "BertModel"))
    objective = Objective.of(recipe)
    optimizer = make_optimizer(recipe, OptimizerSettings(learning_rate=2e-3))
    trainer = Trainer(recipe, objective, optimizer, Schedule(optimizer, ScheduleSettings(40, kind="constant")))
    before = trainer.evaluate([batch(9)])
    for step in range(40):
        trainer.step([batch(step % 8)])
    after = trainer.evaluate([batch(9)])
    for term in recipe.terms:
        if term != "masked_lm":  # the tokens of these batches are random
            assert after[term] < 0.9 * before[term], (term, before, after)


class Rows:
    """A task whose batches are ids."""

    def rows(self, batch: Tensor) -> int:
        return len(batch)

    def logits(self, model: Any, batch: Tensor) -> Tensor:
        logits: Tensor = model(batch).logits
        return logits


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification", "single_label_classification"])
def test_predictions_are_learnt_by_the_kind_of_problem(kind: str) -> None:
    labels = 1 if kind == "regression" else 3
    config = models.BertConfig(**SIZES, num_labels=labels, problem_type=kind)
    torch.manual_seed(0)
    student, teacher = (models.BertForSequenceClassification(config) for _ in range(2))
    recipe = PredictionRecipe(student, teacher, Rows(), temperature=2.0).eval()  # type: ignore[arg-type]
    ids = torch.randint(0, V, (5, 7))
    (loss,) = recipe(ids)
    ours, theirs = student(ids).logits, teacher(ids).logits.detach()
    if kind == "regression":
        expected = 5 * functional.mse_loss(ours, theirs)
    elif kind == "multi_label_classification":
        expected = 5 * functional.binary_cross_entropy_with_logits(ours / 2, (theirs / 2).sigmoid())
    else:
        expected = soft_cross_entropy(ours, theirs, 2.0)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert student.classifier.weight.grad.abs().max() > 0
