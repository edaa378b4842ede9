"""Checkpoints that fasttfm saves make the same predictions in transformers' pipelines: the saved tokenizer adds the
same special tokens, and segments for the models that have them."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import SMALL_FAMILIES, save_small
from small_models import addresses

from fasttfm import models
from fasttfm.data import Tokenizer
from fasttfm.data.task_files import Answer, ChoiceExample, QuestionExample, TagExample, TextExample
from fasttfm.generate import generate
from fasttfm.inference.opening import open_model
from fasttfm.models.family import Head
from fasttfm.tasks.finetuning import predict, prepare, save
from fasttfm.tasks.task import TASK_KEY

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")

WORDS = list(islice(" ".join(addresses(1)).split(), 16))
PARTLY = (
    "openai-gpt",
    "gpt2",
    "eurobert",
    "gte",
    "jina_embeddings_v3",
    "nomic_bert",
)  # without heads for some of the tasks
ENCODERS = [name for name in SMALL_FAMILIES if name not in PARTLY]
TEXTS = [" ".join(WORDS[start : start + 3 + start % 5]) for start in range(len(WORDS) - 3)]
PAIRS = [TextExample(text, TEXTS[index - 3], "abc"[index % 3]) for index, text in enumerate(TEXTS)]


def saved(name: str, directory: Path, train: list[Any], output: Path, **options: Any) -> tuple[Any, Any]:
    """A model with a random head for the task, large enough that predictions differ between examples."""
    torch.manual_seed(1)
    model, task = prepare(name, directory, train, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(model.names.prefix):
                parameter.mul_(10)
    save(model, task, output)
    return model, task


@pytest.fixture(params=SMALL_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def directory(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind = SMALL_FAMILIES[family][2]
    return save_small(family, request.getfixturevalue(kind), tmp_path / "small")


def test_labels_of_pairs(family: str, directory: Path, tmp_path: Path) -> None:
    model, task = saved("pair", directory, PAIRS, tmp_path / "pair")
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "pair"), device="cpu")
    texts = [{"text": pair.first, "text_pair": pair.second} for pair in PAIRS]
    with torch.no_grad():
        ours = task.logits(model.eval(), task.batch(task.features(PAIRS)))
    assert float(ours.std(0).max()) > 1e-2  # between examples
    for logits, labels in zip(ours, pipeline(texts, top_k=None, function_to_apply="none"), strict=True):
        expected = dict(zip(task.labels, logits.tolist(), strict=True))
        assert {label["label"]: label["score"] for label in labels} == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert pipeline.tokenizer.model_max_length == (512 if family == "xlnet" else 64)  # which has no limit itself
    assert ("token_type_ids" in pipeline.tokenizer("a", "b")) == (
        family in ("bert", "albert", "electra", "nomic_bert", "xlnet")
    )


def test_values_of_pairs(bert_directory: Path, tmp_path: Path) -> None:
    examples = [TextExample(pair.first, pair.second, "0.5") for pair in PAIRS]
    model, task = saved("pair", bert_directory, examples, tmp_path, values=True)
    pipeline = transformers.pipeline("text-classification", str(tmp_path), device="cpu")
    theirs = pipeline([{"text": example.first, "text_pair": example.second} for example in examples])
    assert [result["score"] for result in theirs] == pytest.approx(predict(model, task, examples), abs=1e-4)


@pytest.mark.parametrize("family", ENCODERS, indirect=True)
def test_answers(directory: Path, tmp_path: Path) -> None:
    """transformers 5 has no pipeline for questions: its tokenizer and its model give the same logits."""
    examples = [QuestionExample(text, text[:9], text, [Answer(text[:3], 0)], False) for text in TEXTS]
    model, task = saved("qa", directory, examples, tmp_path / "qa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "qa")
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "qa").eval()
    for feature, example in zip(task.features(examples), examples, strict=True):
        encoded = tokenizer(example.question, example.context, return_tensors="pt")
        batch = task.batch([feature])
        assert encoded["input_ids"][0].tolist() == batch.input_ids.tolist()
        with torch.no_grad():
            expected, logits = theirs(**encoded), task.logits(model.eval(), batch).numpy()
        for ours, other in zip(logits, (expected.start_logits, expected.end_logits), strict=True):
            assert ours[: feature.tokens] == pytest.approx(other[0].numpy(), abs=1e-4)


@pytest.mark.parametrize("family", ENCODERS, indirect=True)
def test_tags(directory: Path, tmp_path: Path) -> None:
    tags = ("O", "B-X", "I-X", "B-Y")
    examples = [TagExample(text.split(), [tags[index % 4] for index, _ in enumerate(text.split())]) for text in TEXTS]
    model, task = saved("tag", directory, examples, tmp_path / "tag")
    pipeline = transformers.pipeline("token-classification", str(tmp_path / "tag"), device="cpu", ignore_labels=[])
    for example, ours in zip(examples, predict(model, task, examples), strict=True):
        text = " ".join(example.words)
        entities = {entity["start"]: entity["entity"] for entity in pipeline(text)}
        offsets = [len(" ".join(example.words[:number])) + bool(number) for number in range(len(example.words))]
        assert [
            entities.get(offset, entities.get(offset - 1)) for offset in offsets
        ] == ours  # a token may have the space


@pytest.mark.parametrize("family", ENCODERS, indirect=True)
def test_choices(directory: Path, tmp_path: Path) -> None:
    examples = [ChoiceExample(text, "", TEXTS[1 + index % 3 : 4 + index % 3], 0) for index, text in enumerate(TEXTS)]
    model, task = saved("choice", directory, examples, tmp_path / "choice")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "choice")
    theirs = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path / "choice").eval()
    for example, ours in zip(examples, predict(model, task, examples), strict=True):
        encoded = tokenizer([example.context] * 3, example.endings, return_tensors="pt", padding=True)
        with torch.no_grad():
            logits = theirs(**{name: value[None] for name, value in encoded.items()}).logits
        assert int(logits.argmax()) == ours


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra"])
def test_masked_tokens_and_states(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(SMALL_FAMILIES[name][2])
    directory = save_small(name, tokenizer, tmp_path / name, head="ForMaskedLM")
    mask = tokenizer.token(tokenizer.special.mask or 0)
    pipeline = transformers.pipeline("fill-mask", str(directory), device="cpu", top_k=5)
    model: Any = open_model(directory, Head.MASKED_LM)
    for text in TEXTS:
        words = text.split()
        words[1] = mask
        special = tokenizer.special
        ids = torch.tensor([[special.cls, *tokenizer.encode(" ".join(words)), special.sep]])
        with torch.no_grad():
            probabilities = model(ids).logits[ids == special.mask][0].softmax(-1)
        best = probabilities.topk(5)
        tokens = pipeline(" ".join(words))
        assert [token["token"] for token in tokens] == best.indices.tolist()
        assert [token["score"] for token in tokens] == pytest.approx(best.values.tolist(), abs=1e-5)
    states = transformers.pipeline("feature-extraction", str(directory), device="cpu", return_tensors=True)(TEXTS[2])
    base: Any = open_model(directory, Head.NONE)
    ids = torch.tensor([[special.cls, *tokenizer.encode(TEXTS[2]), special.sep]])
    with torch.no_grad():
        assert torch.allclose(states, base(ids).last_hidden_state, atol=1e-4)


@pytest.mark.parametrize("name", ["openai-gpt", "gpt2"])
def test_continuations(name: str, bpe: Tokenizer, tmp_path: Path) -> None:
    directory = save_small(name, bpe, tmp_path, head="LMHeadModel")
    assert bpe.backend.encode("a").tokens == ["<s>", "a", "</s>"]  # which no prompt has
    pipeline = transformers.pipeline("text-generation", str(directory), device="cpu")
    model: Any = open_model(directory, Head.CAUSAL_LM)
    for text in TEXTS[:4]:
        ids = torch.tensor([bpe.encode(text)])
        ours = generate(model, ids, max_new_tokens=6, eos_token_id=bpe.special.eos)[0]
        token_ids = pipeline(text, max_new_tokens=6, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
        assert token_ids == ours.tolist()


def test_a_checkpoint_has_the_files_of_its_use(bert_directory: Path, tmp_path: Path) -> None:
    examples = [QuestionExample(text, text[:9], text, [Answer(text[:3], 0)], False) for text in TEXTS]
    _, task = saved("qa", bert_directory, examples, tmp_path, max_length=48, stride=7, max_answer=5)
    expected = {"task": "qa", "values": False, "max_length": 48, "stride": 7, "max_question": 11, "max_answer": 5}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config[TASK_KEY] == {**expected, "threshold": None, "answer_score": None}
    task.threshold = 1.5
    save(models.BertForQuestionAnswering.from_pretrained(tmp_path), task, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[TASK_KEY]["threshold"] == 1.5
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 128
    assert settings["model_input_names"] == ["input_ids", "token_type_ids", "attention_mask"]
