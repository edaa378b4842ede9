"""The parts of fine-tuning: features, targets and predictions of examples; training; errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_families import SMALL_FAMILIES, save_small

from fasttfm import models
from fasttfm.data import DataError, Tokenizer
from fasttfm.data.task_files import Answer, ChoiceExample, QuestionExample, TagExample, TextExample
from fasttfm.models import bert
from fasttfm.models.families import family_of_type
from fasttfm.tasks.answers import window_answer
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, format_of, predict, prepare
from fasttfm.tasks.labels import TagTask
from fasttfm.tasks.questions import QuestionTask
from fasttfm.tasks.rates import Rates, freeze
from fasttfm.tasks.reading import read_examples
from fasttfm.tasks.registry import TASKS
from fasttfm.tasks.task import Language
from fasttfm.train.loop import NonFiniteError, check_finite

TEXTS = ["peace and commerce", "war and the army", "the peace of nations", "an army in war"]
pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")
PEACE = [TextExample(text, None, "peace" if "peace" in text else "war") for text in TEXTS]


def language(tokenizer: Tokenizer, length: int = 32) -> Language:
    config = SimpleNamespace(type_vocab_size=2)
    return Language(tokenizer, bert.FAMILY, format_of(bert.FAMILY, config, tokenizer, length))


def settings(rate: float = 3e-3, **changes: Any) -> FinetuneSettings:
    return FinetuneSettings(rates=Rates(rate), **changes)


def trained(directory: Path, changes: dict[str, Any], **options: Any) -> tuple[Any, Any, list[float]]:
    model, task = prepare("classify", directory, PEACE, **options)
    losses: list[float] = []
    FineTuning(model, task, PEACE, settings(**changes)).run(
        lambda results: losses.extend(result.loss for result in results)
    )
    return model, task, losses


# ---- training --------------------------------------------------------------------------------------------------------


def test_the_seed_determines_the_run(bert_directory: Path) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)  # of the head
        model, _, losses = trained(bert_directory, {"epochs": 2, "tokens_per_batch": 12, "seed": seed})
        assert len(losses) == 4
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_a_run_in_which_every_step_was_skipped_raises(bert_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = prepare("classify", bert_directory, PEACE)
    work = FineTuning(model, task, PEACE, settings(epochs=1))
    monkeypatch.setattr(task, "losses", lambda module, batch: (module.classifier.weight.sum() * torch.nan,))
    with pytest.raises(NonFiniteError, match=r"was not finite in any of the 1 steps; nothing was changed"):
        work.run(lambda results: None)


def test_parameters_that_are_not_finite_are_reported(bert_directory: Path) -> None:
    model, _ = prepare("classify", bert_directory, PEACE)
    check_finite(model)
    with torch.no_grad():
        model.classifier.bias[0] = torch.inf  # type: ignore[union-attr, operator, index]
    with pytest.raises(NonFiniteError, match=r"not finite after training: classifier\.bias and 0 more"):
        check_finite(model)


def test_microbatches_are_one_batch(bert_directory: Path) -> None:
    parameters = []
    for changes in ({"tokens_per_batch": 1000}, {"tokens_per_batch": 14, "accumulation": 100}):
        torch.manual_seed(0)
        _, _, losses = trained(bert_directory, {"epochs": 1, "warmup": 0.0, **changes})
        assert len(losses) == 1
        parameters.append(losses[0])
    assert parameters[0] == pytest.approx(parameters[1], rel=1e-5)


def test_frozen_parameters_do_not_change(bert_directory: Path) -> None:
    model, task = prepare("classify", bert_directory, PEACE)
    freeze(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    FineTuning(model, task, PEACE, settings(epochs=1)).run(lambda results: None)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"bert.pooler.weight", "bert.pooler.bias", "classifier.weight", "classifier.bias"}


def test_predictions_do_not_depend_on_the_batch(bert_directory: Path) -> None:
    model, task = prepare("classify", bert_directory, PEACE)
    logits = [
        torch.cat([task.logits(model, task.batch([feature])) for feature in task.features(PEACE)]),
        task.logits(model, task.batch(task.features(PEACE))),
    ]
    assert torch.allclose(*logits, atol=1e-5)
    assert predict(model, task, PEACE, tokens=1) == predict(model, task, PEACE, tokens=1000)


def test_labels_keep_a_trained_models_order(bert_directory: Path, tmp_path: Path) -> None:
    model, task = prepare("classify", bert_directory, PEACE, labels=["war", "peace"])
    assert task.labels == ["war", "peace"]
    model.save_pretrained(tmp_path)
    task.language.tokenizer.save(tmp_path)
    again, same = prepare("classify", tmp_path, PEACE)
    assert same.labels == ["war", "peace"]
    assert torch.equal(again.classifier.weight, model.classifier.weight)
    assert prepare("classify", bert_directory, PEACE)[1].labels == ["peace", "war"]


def test_values_are_estimated(bert_directory: Path) -> None:
    examples = [TextExample(text, None, "1.0" if "peace" in text else "-1") for text in TEXTS]
    model, task = prepare("classify", bert_directory, examples, values=True)
    FineTuning(model, task, examples, settings(epochs=20)).run(lambda results: None)
    assert model.config.num_labels == 1
    assert task.scores(examples, predict(model, task, examples))["pearson"] > 0.9
    assert task.majority(examples, examples) == [0.0] * 4
    with pytest.raises(DataError, match="label: expected a number as label, got 'peace'"):
        task.features(PEACE)


# ---- families --------------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, list[Any]] = {
    "pair": [TextExample(first, "and so on", "a" if "war" in first else "b") for first in TEXTS],
    "tag": [TagExample(text.split(), ["O"] * (len(text.split()) - 1) + ["B-X"]) for text in TEXTS],
    "qa": [QuestionExample(text, "what?", text, [Answer(text[:3], 0)], False) for text in TEXTS],
    "choice": [ChoiceExample(text, "", ["yes", "no", "perhaps"], index % 3) for index, text in enumerate(TEXTS)],
}


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_every_family_takes_a_step(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Packed batches of every task, with the properties of each family: segments, one or two separators, new tokens."""
    tokenizer: Tokenizer = request.getfixturevalue(SMALL_FAMILIES[family][2])
    save_small(family, tokenizer, tmp_path)
    gpt = family in ("openai-gpt", "gpt2")
    roberta = family in ("roberta", "xlm-roberta", "camembert", "eurobert", "gte", "jina_embeddings_v3")  # RoBERTa's
    for task_name, examples in EXAMPLES.items():
        if TASKS[task_name].head not in family_of_type(family).models:
            continue
        model, task = prepare(task_name, tmp_path, examples)
        batch = task.batch(task.features(examples))
        assert (batch.token_type_ids is None) == (
            gpt or roberta or family in ("distilbert", "modernbert", "mpnet", "deberta-v2")
        )
        separators = batch.input_ids.tolist().count(tokenizer.special.sep)
        assert separators == (0 if gpt else 2 + roberta) * (len(batch.cu_seqlens) - 1) or task_name == "tag"
        before = {name: value.clone() for name, value in model.state_dict().items()}
        FineTuning(model, task, examples, settings(epochs=1, warmup=0.0)).run(lambda results: None)
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        assert any("encoder.layers.0" in name for name in moved)
        assert any("embeddings" in name for name in moved)
        assert len(predict(model, task, examples)) == len(examples)


# ---- GPT-1 -----------------------------------------------------------------------------------------------------------


def test_a_gpt_learns_labels_with_an_auxiliary_lm_loss(gpt_directory: Path) -> None:
    model, task, losses = trained(gpt_directory, {"epochs": 20})
    assert isinstance(model, models.OpenAIGPTForSequenceClassification)
    assert predict(model, task, PEACE) == [example.label for example in PEACE]
    assert losses[-1] < losses[0] / 2
    batch = task.batch(task.features(PEACE))
    with_words = float(task.loss(model, batch).detach())
    task.auxiliary = 0.0
    labels_only = float(task.loss(model, task.batch(task.features(PEACE))).detach())
    assert "lm_labels" in batch.targets
    words = models.OpenAIGPTLMHeadModel(model.config)
    words.transformer.load_state_dict(model.transformer.state_dict())
    mean = float(words.eval()(**batch.inputs(), labels=batch.input_ids).loss.detach())
    assert with_words == pytest.approx(labels_only + 0.5 * mean, rel=1e-4)


def test_the_weight_of_the_auxiliary_loss_is_an_option(gpt_directory: Path) -> None:
    losses = []
    for auxiliary in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        model, task = prepare("classify", gpt_directory, PEACE, auxiliary=auxiliary)
        losses.append(float(task.loss(model, task.batch(task.features(PEACE))).detach()))
    assert losses[2] - losses[1] == pytest.approx(losses[1] - losses[0], rel=1e-3)
    assert losses[1] > losses[0]


@pytest.mark.parametrize("name", ["classify", "choice"])
def test_results_have_gpt_1s_losses(name: str, gpt_directory: Path) -> None:
    """L2 of the labels and L1 of the tokens; the loss is L3, their weighted sum."""
    examples = PEACE if name == "classify" else [ChoiceExample("the state", "", ["of war", "of peace"], 1)]
    model, task = prepare(name, gpt_directory, examples, auxiliary=0.25)
    results: list[Any] = []
    FineTuning(model, task, examples, FinetuneSettings(epochs=1)).run(results.extend)
    terms = results[0].terms
    assert list(terms) == [f"L2_{name}", "L1_causal_lm"]
    assert results[0].loss == pytest.approx(terms[f"L2_{name}"] + 0.25 * terms["L1_causal_lm"])
    assert terms["L1_causal_lm"] > 2 * terms[f"L2_{name}"]  # near the logarithm of the vocabulary's size
    _, alone = prepare(name, gpt_directory, examples, auxiliary=0.0)
    assert (alone.terms, alone.weights) == ((name,), (1.0,))


@pytest.mark.parametrize(("family", "task"), [("gpt2", "classify"), ("bert", "choice")])
def test_models_without_an_auxiliary_loss_refuse_its_weight(
    family: str, task: str, bpe: Tokenizer, wordpiece: Tokenizer, tmp_path: Path
) -> None:
    tokenizer = bpe if family == "gpt2" else wordpiece
    directory = save_small(family, tokenizer, tmp_path)
    examples = PEACE if task == "classify" else [ChoiceExample("peace", "", ["a", "b"], 0)]
    assert not prepare(task, directory, examples)[1].has_auxiliary
    with pytest.raises(ValueError, match=rf"auxiliary: expected a GPT-1, .* got .* with {task}"):
        prepare(task, directory, examples, auxiliary=0.5)


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_words_are_tagged_by_their_first_token(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    words = ["Constantinople", ",", "the", "government's", "D.C.", "war"]
    example = TagExample(words, ["B-LOC", "O", "O", "B-ORG", "B-LOC", "O"])
    task = TagTask(language(tokenizer, 64), [example])
    (feature,) = task.features([example])
    batch = task.batch([feature])
    labels = batch.targets["labels"]
    positions = (labels != -100).nonzero().flatten().tolist()
    assert len(positions) == len(words) < len(batch.input_ids) - 2
    assert [task.labels[label] for label in labels[positions]] == example.tags
    assert batch.count == len(words)
    for position, word in zip(positions, words, strict=True):
        piece = tokenizer.token(batch.input_ids[position]).lstrip("Ġ").lower()
        assert word.lower().startswith(piece)


def test_a_long_sentence_is_tagged_in_pieces(wordpiece: Tokenizer) -> None:
    words = ["the", "Congress"] * 30
    example = TagExample(words, ["O", "B-ORG"] * 30)
    task = TagTask(language(wordpiece, 16), [example])
    features = task.features([example])
    assert len(features) > 3
    batch = task.batch(features)
    assert all(feature.tokens <= 16 for feature in features)
    assert batch.count == 60
    perfect = torch.nn.functional.one_hot(batch.targets["labels"].clamp(min=0), 2).float()
    predictions = task.predictions([example], features, task.read(batch, perfect))
    assert predictions == [example.tags]
    assert task.scores([example], predictions)["f1"] == 1.0


# ---- endings ---------------------------------------------------------------------------------------------------------


def test_endings_are_read_after_the_context(bert_directory: Path) -> None:
    example = ChoiceExample("the war", "then", ["came peace", "went on"], 1)
    model, task = prepare("choice", bert_directory, [example])
    (feature,) = task.features([example])
    tokenizer = task.language.tokenizer
    assert [tokenizer.decode(sequence.ids) for sequence in feature.sequences] == [
        "the war then came peace",
        "the war then went on",
    ]
    assert task.logits(model, task.batch([feature])).shape == (1, 2)
    with pytest.raises(DataError, match="example 1: expected 2 endings, as the first example has, got 3"):
        task.features([ChoiceExample("a", "", ["b", "c", "d"], 0)])


# ---- questions -------------------------------------------------------------------------------------------------------


def question(context: str, answer: str | None, number: int = 0) -> QuestionExample:
    answers = [] if answer is None else [Answer(answer, context.index(answer))]
    return QuestionExample(f"q{number}", "Which year?", context, answers, answer is None)


def test_answers_are_found_over_windows(wordpiece: Tokenizer) -> None:
    """With logits for the correct tokens, the prediction is the text of the answer, in whichever window it is."""
    long = " ".join(["peace and commerce with all nations"] * 12)
    examples = [question(f"{long}, in 1787; {long}", "1787"), question(long, None, 1), question("In 1812.", "1812", 2)]
    task = QuestionTask(language(wordpiece, 40), examples, stride=9)
    features = task.features(examples)
    assert len(features) > 10
    batch = task.batch(features)
    assert all(len(sequence.ids) <= 40 for feature in features for sequence in feature.sequences)
    starts, ends = batch.targets["start_positions"], batch.targets["end_positions"]
    longest = max(feature.tokens for feature in features)
    logits = torch.stack(
        [torch.nn.functional.one_hot(positions, longest).float() * 9 for positions in (starts, ends)]
    ).flatten(0, 1)
    predictions = task.predictions(examples, features, task.read(batch, logits))
    assert predictions[0].text == "1787"
    assert predictions[2].text == "1812"
    task.tune(examples, predictions)
    assert task.answers(examples, predictions) == {"q0": "1787", "q1": "", "q2": "1812"}
    assert task.scores(examples, predictions)["exact"] == 1.0


def test_without_unanswerable_questions_nothing_is_tuned(wordpiece: Tokenizer) -> None:
    examples = [question("In 1812.", "1812")]
    task = QuestionTask(language(wordpiece), examples)
    features = task.features(examples)
    rows = np.zeros((1, features[0].tokens))
    rows[0, 0] = 99.0  # predicts that there is no answer
    read = window_answer(features[0].target.window, rows[0], rows[0], task.max_answer)
    predictions = task.predictions(examples, features, [read])
    task.tune(examples, predictions)
    assert task.threshold is None
    assert task.answers(examples, predictions)["q0"] != ""


def test_logits_of_questions_are_the_models(bert_directory: Path) -> None:
    examples = [question("In 1812 or later.", "1812"), question("In 1912.", "1912", 1)]
    model, task = prepare("qa", bert_directory, examples)
    batch = task.batch(task.features(examples))
    with torch.no_grad():
        starts, ends = task.logits(model, batch).numpy().reshape(2, len(batch.features), -1)
        for feature, start, end in zip(batch.features, starts, ends, strict=True):
            alone = model(torch.tensor([feature.sequences[0].ids]), None, torch.tensor([feature.sequences[0].segments]))
            assert np.allclose(start[: feature.tokens], alone.start_logits[0].numpy(), atol=1e-4)
            assert np.allclose(end[: feature.tokens], alone.end_logits[0].numpy(), atol=1e-4)
            assert (start[feature.tokens :] < -1e30).all()


# ---- sources of examples ---------------------------------------------------------------------------------------------


def test_a_directory_has_parts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a file whose name has 'train' in it, got none"):
        read_examples("classify", tmp_path)
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na\t0\nb\t1\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nc\t1\n")
    parts = read_examples("classify", tmp_path)
    assert [example.first for example in parts.train] == ["a", "b"]
    assert [example.first for example in parts.dev] == ["c"]
    (tmp_path / "dev_mismatched.tsv").write_text("sentence\tlabel\nd\t1\n")
    assert read_examples("classify", tmp_path) == parts
    (tmp_path / "dev.tsv").rename(tmp_path / "my_dev.tsv")
    with pytest.raises(DataError, match=r"expected one file for dev, got dev_mismatched.tsv, my_dev.tsv"):
        read_examples("classify", tmp_path)
    assert read_examples("classify", tmp_path, tmp_path / "my_dev.tsv") == parts


def test_a_tenth_is_the_dev_set_if_there_is_no_other(tmp_path: Path) -> None:
    path = tmp_path / "all.tsv"
    path.write_text("sentence\tlabel\n" + "".join(f"text {number}\t{number % 2}\n" for number in range(40)))
    parts = read_examples("classify", path)
    assert (len(parts.train), len(parts.dev)) == (36, 4)
    assert {example.first for example in [*parts.train, *parts.dev]} == {f"text {number}" for number in range(40)}
    assert read_examples("classify", path) == parts
    assert read_examples("classify", path, seed=1) != parts


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_examples_without_labels_are_refused(bert_directory: Path) -> None:
    with pytest.raises(DataError, match="training example 1: expected a label, got none"):
        prepare("classify", bert_directory, [TextExample("a", None, None)])
    with pytest.raises(DataError, match="expected training examples, got none"):
        prepare("tag", bert_directory, [])


def test_lengths_and_vocabularies_must_fit(bert_directory: Path, bpe: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_length: expected no more than the model's 128 positions, got 200"):
        prepare("classify", bert_directory, PEACE, max_length=200)
    config = models.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    models.BertModel(config).save_pretrained(tmp_path)
    bpe.save(tmp_path)
    with pytest.raises(
        DataError, match=f"expected no more tokens than the model's 50, got a tokenizer with {bpe.vocab_size}"
    ):
        prepare("classify", tmp_path, PEACE)
