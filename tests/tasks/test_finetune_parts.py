"""Options of fine-tuning: class weights, frozen layers, LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import save_bert
from torch.nn import functional

from fasttfm import models
from fasttfm.data import DataError, Tokenizer
from fasttfm.data.task_files import ChoiceExample, TagExample, TextExample
from fasttfm.inference.opening import open_model
from fasttfm.models.family import Head
from fasttfm.models.lora import adapters_in
from fasttfm.tasks.class_weights import balanced_weights, read_weights
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare, save
from fasttfm.tasks.lora import Lora
from fasttfm.tasks.rates import Rates, freeze

pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")
TEXTS = ["peace and commerce", "war and the army", "the peace of nations", "an army in war", "a union"]
PEACE = [TextExample(text, None, "peace" if "peace" in text else "war") for text in TEXTS]
TAGS = [TagExample(text.split(), ["B-X" if word == "war" else "O" for word in text.split()]) for text in TEXTS]


@pytest.fixture(scope="module")
def model_directory(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(wordpiece, tmp_path_factory.mktemp("model"), hidden_size=32, num_hidden_layers=3)


def settings(**changes: Any) -> FinetuneSettings:
    return FinetuneSettings(rates=Rates(3e-3), **{"epochs": 1, "warmup": 0.0, **changes})


def changed(model: Any, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


# ---- class weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "examples"), [("classify", PEACE), ("tag", TAGS)])
def test_the_loss_is_torchs_weighted_mean(name: str, examples: list[Any], model_directory: Path) -> None:
    losses = []
    for changes in ({}, {"batch_size": 2, "accumulation": 3}):
        torch.manual_seed(0)
        model, task = prepare(name, model_directory, examples)
        batch = task.batch(task.features(examples))
        with torch.no_grad():
            logits = task.logits(model, batch)
        step_losses: list[float] = []
        work = FineTuning(model, task, examples, settings(**changes), class_weights=[3.0, 0.5])
        work.run(lambda results, step_losses=step_losses: step_losses.extend(result.loss for result in results))
        expected = functional.cross_entropy(logits, batch.targets["labels"], torch.tensor([3.0, 0.5]))
        plain = functional.cross_entropy(logits, batch.targets["labels"])
        assert step_losses == [pytest.approx(float(expected), rel=1e-5)]
        assert abs(float(plain - expected)) > 1e-3
        losses += step_losses
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_balanced_weights_are_scikit_learns(model_directory: Path, tmp_path: Path) -> None:
    from sklearn.utils.class_weight import compute_class_weight

    model, task = prepare("classify", model_directory, PEACE)
    labels = [example.label for example in PEACE]
    expected = compute_class_weight("balanced", classes=np.array(task.labels), y=labels)
    assert balanced_weights(task, task.features(PEACE)) == pytest.approx(list(expected))
    assert FineTuning(model, task, PEACE, settings(), class_weights="balanced").class_weights == pytest.approx(
        list(expected)
    )
    path = tmp_path / "weights.json"
    path.write_text('{"war": 2, "peace": 0.5}')
    assert read_weights(task, path) == [0.5, 2.0]
    for text, message in (
        ("{", "expected JSON"),
        ('{"war": 1}', "expected a weight for each of the labels peace, war, got war"),
        ('{"war": 1, "peace": -1}', "expected a number from 0 on as the weight of peace, got -1"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_weights(task, path)
    _, task = prepare("classify", model_directory, [TextExample("a", None, "0.5")], values=True)
    with pytest.raises(ValueError, match="class_weights: expected a task with one label for each text or word, got cl"):
        read_weights(task, path)


# ---- frozen layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_frozen_layers_do_not_change(layers: int, model_directory: Path) -> None:
    model, task = prepare("classify", model_directory, PEACE)
    freeze(model, layers)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    FineTuning(model, task, PEACE, settings()).run(lambda results: None)
    moved = changed(model, before)
    assert {name.split(".")[3] for name in moved if "encoder.layers" in name} == {str(n) for n in range(layers, 3)}
    assert not any("embeddings" in name for name in moved)
    assert {"classifier.weight", "bert.pooler.weight"} < moved


def test_layers_above_frozen_ones_have_the_same_gradients(model_directory: Path) -> None:
    gradients = []
    for layers in (None, 2):
        torch.manual_seed(0)
        model, task = prepare("classify", model_directory, PEACE)
        if layers is not None:
            freeze(model, layers)
        task.loss(model, task.batch(task.features(PEACE))).backward()
        gradients.append(
            {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    assert set(gradients[1]) < set(gradients[0])
    for name, gradient in gradients[1].items():
        assert torch.allclose(gradient, gradients[0][name], rtol=1e-5, atol=1e-7), name


def test_shared_layers_cannot_be_frozen_one_by_one(wordpiece: Tokenizer, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = models.AlbertConfig(vocab_size=wordpiece.vocab_size, embedding_size=16, **sizes)
    with pytest.raises(ValueError, match="expected a model whose layers do not share parameters, got shared ones"):
        freeze(models.AlbertForSequenceClassification(config), 1)


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def test_lora_trains_low_rank_updates(model_directory: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="it opens the adapter")
    import transformers

    torch.manual_seed(0)
    model, task = prepare("classify", model_directory, PEACE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = task.logits(model, task.batch(task.features(PEACE)))
    lora = Lora(model, 4)
    torch.manual_seed(1)
    batch = task.batch(task.features(PEACE))
    assert torch.allclose(task.logits(model, batch), plain, atol=1e-6)  # B is 0 at first
    FineTuning(model, task, PEACE, settings(epochs=5)).run(lambda results: None)
    model.eval()
    with torch.no_grad():
        trained = task.logits(model, batch)
    assert not torch.allclose(trained, plain, atol=1e-3)
    expected = predict(model, task, PEACE)
    updates = {target.name: module.matrices() for target, module in adapters_in(model)}
    lora.save(tmp_path)
    lora.merge()
    with torch.no_grad():
        assert torch.allclose(task.logits(model, batch), trained, atol=1e-5)
    assert predict(model, task, PEACE) == expected
    for name, value in model.state_dict().items():
        if (matrices := updates.get(name.removesuffix(".weight"))) is not None and name.endswith("weight"):
            assert len(matrices.blocks) == (3 if "qkv" in name else 1)
            update = torch.cat([b @ a for a, b in zip(matrices.a, matrices.b, strict=True)])
            assert torch.allclose(value, before[name] + 2 * update, atol=1e-6), name
        elif model._head(name) == "":
            assert torch.equal(value, before[name]), name
    save(model, task, tmp_path / "merged")
    assert torch.allclose(
        task.logits(open_model(tmp_path / "merged", Head.SEQUENCE_CLASSIFICATION), batch), trained, atol=1e-5
    )
    theirs = transformers.BertForSequenceClassification.from_pretrained(model_directory).eval()
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    for feature, row in zip(task.features(PEACE), trained, strict=True):
        with torch.no_grad():
            logits = adapted(torch.tensor([feature.sequences[0].ids])).logits[0]
        assert torch.allclose(logits, row, atol=1e-4)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_lora_of_a_gpt(gpt_directory: Path) -> None:
    model, task = prepare("classify", gpt_directory, PEACE)
    lora = Lora(model, 2)
    FineTuning(model, task, PEACE, settings(epochs=3)).run(lambda results: None)
    model.eval()
    batch = task.batch(task.features(PEACE))
    with torch.no_grad():
        trained = task.logits(model, batch)
        lora.merge()
        assert torch.allclose(task.logits(model, batch), trained, atol=1e-5)


# ---- GPT-3 -----------------------------------------------------------------------------------------------------------


def test_a_gpt3_has_heads(bpe: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "local_window": 4}
    models.GPT3LMHeadModel(models.GPT3Config(vocab_size=bpe.vocab_size, **sizes)).save_pretrained(tmp_path)
    bpe.save(tmp_path)
    model, task = prepare("classify", tmp_path, PEACE)
    FineTuning(model, task, PEACE, settings(epochs=25)).run(lambda results: None)
    assert predict(model, task, PEACE) == [example.label for example in PEACE]
    save(model, task, tmp_path / "tuned")
    again = open_model(tmp_path / "tuned", Head.SEQUENCE_CLASSIFICATION, trained=True)
    assert type(again) is models.GPT3ForSequenceClassification
    choices = [ChoiceExample(text, "", ["yes", "no"], number % 2) for number, text in enumerate(TEXTS)]
    model, task = prepare("choice", tmp_path, choices)
    assert type(model) is models.GPT3DoubleHeadsModel
    assert len(predict(model, task, choices)) == len(choices)


# ---- the recipe ------------------------------------------------------------------------------------------------------


def test_steps_are_those_of_transformers_and_torch(model_directory: Path, tmp_path: Path) -> None:
    """The same batches without dropout, against transformers' model on padded batches with torch's AdamW and clipping
    and the linear schedule, which here does not start at 0."""
    import transformers

    torch.manual_seed(0)
    model, task = prepare("classify", model_directory, PEACE)
    save(model, task, tmp_path)
    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path).train()
    work = FineTuning(model, task, PEACE, settings(epochs=4, batch_size=2, warmup=0.2))
    results: list[Any] = []
    work.run(results.extend)
    decays = {True: [], False: []}  # type: dict[bool, list[Any]]
    for name, parameter in theirs.named_parameters():
        decays["bias" not in name and "LayerNorm" not in name].append(parameter)
    groups = [{"params": decays[True], "weight_decay": 0.01}, {"params": decays[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-6)
    batches = [group for epoch in work._epochs for (group,) in epoch]
    assert len(batches) == len(results) == 12
    for step, (features, result) in enumerate(zip(batches, results, strict=True)):
        rate = 3e-3 * ((step + 1) / 2 if step < 2 else (12 - step) / 10)
        assert result.learning_rate == pytest.approx(rate, rel=1e-6)
        rows = [torch.tensor(feature.sequences[0].ids) for feature in features]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in rows], batch_first=True)
        loss = theirs(ids, mask, labels=torch.tensor([feature.target for feature in features])).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # fp32 sums in another order, over a dozen steps.
        assert result.loss == pytest.approx(float(loss), rel=1e-4)
        assert result.gradient_norm == pytest.approx(float(norm), rel=1e-3)
