"""``fasttfm.patch`` on models of sentence-transformers and PEFT, and on the families that most of them contain."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import tensors, theirs_of
from patched_models import MASKS, batch, check_patched, pair, with_dropout
from torch import Tensor

import fasttfm
from fasttfm import ops
from fasttfm.testing import compare
from fasttfm.testing.tolerance import OUTPUT_FACTOR

transformers = pytest.importorskip("transformers")

TEXTS = [
    "the cat sat on the mat",
    "a dog ran",
    "it slept all day under the tree and then the dog ran and the cat sat",
    "cat",
    "the dog slept",
]
WORDS = sorted({word for text in TEXTS for word in text.split()})
SPECIAL = {"Bert": ("[CLS]", "[SEP]"), "XLMRoberta": ("<s>", "</s>"), "MPNet": ("<s>", "</s>")}


def check(found: Any, theirs: Any, run: Any) -> None:
    """The result of a patched model against ``run`` of the unpatched one, by the tolerance rule."""
    results = (found, run(theirs), run(copy.deepcopy(theirs).double()))
    comparison = compare("result", *(torch.as_tensor(each) for each in results), OUTPUT_FACTOR)
    assert comparison.ok, str(comparison)


def encode(model: Any) -> Any:
    return model.encode(TEXTS)


# ---- families --------------------------------------------------------------------------------------------------------


def caller(given: dict[str, Tensor], *outputs: str) -> Any:
    mask = given.get("attention_mask")

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        found = tensors(module(**given), mask)
        return {key: value for key, value in found.items() if key.startswith(outputs)}

    return call


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", ["XLMRoberta", "Camembert", "MPNet"])
def test_losses_and_gradients(family: str, mask: str) -> None:
    ours, theirs = (module.train() for module in pair(f"{family}ForMaskedLM"))
    check_patched(ours, theirs, caller(batch(f"{family}ForMaskedLM", mask), "loss"))


@pytest.mark.parametrize(
    "name", ["XLMRobertaForSequenceClassification", "MPNetForSequenceClassification", "MPNetModel"]
)
def test_evaluation(name: str) -> None:
    ours, theirs = pair(name)
    check_patched(ours, theirs, caller(batch(name), "loss", "logits", "last_hidden_state"))


def test_attention_weights_of_mpnet() -> None:
    ours, theirs = pair("MPNetModel")
    given = batch("MPNetModel") | {"output_attentions": True}

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"weights {layer}": each for layer, each in enumerate(module(**given).attentions)}

    check_patched(ours, theirs, call)


def test_dropout_of_mpnet() -> None:
    ours, _ = pair("MPNetModel", dropout=0.5)
    given = batch("MPNetModel")

    def states(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ours(**given).last_hidden_state

    ours.train()
    assert torch.equal(states(0), states(0))
    assert not torch.equal(states(0), states(1))
    ours.eval()
    assert torch.equal(states(0), states(1))


def test_reports_list_what_is_not_patched() -> None:
    report = fasttfm.patch(theirs_of("MPNetForMaskedLM"))
    assert "relative positions" in report.left["attention"]
    assert sum(report.changed.values()) > 10
    report = fasttfm.patch(theirs_of("XLMRobertaForMaskedLM"))
    assert list(report.left) == ["poolers and classifiers"]


@pytest.mark.parametrize("name", ["XLMRobertaModel", "CamembertModel", "MPNetModel"])
def test_unpatch(name: str) -> None:
    module = theirs_of(name)
    classes = [type(each) for each in module.modules()]
    before = module.config._attn_implementation
    fasttfm.patch(module)
    assert [type(each) for each in module.modules()] != classes
    fasttfm.unpatch(module)
    assert [type(each) for each in module.modules()] == classes
    assert module.config._attn_implementation == before


# ---- models that contain them ----------------------------------------------------------------------------------------


def write_model(directory: Path, name: str) -> Path:
    """A small checkpoint of a class of transformers with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    start, end = SPECIAL[next(family for family in SPECIAL if name.startswith(family))]
    special = [start, "<pad>", end, "<unk>", "<mask>"]  # padding is 1, as for RoBERTa
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing((end, 2), (start, 0))
    names = {"cls_token": start, "sep_token": end, "bos_token": start, "eos_token": end}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=20,
        **names,
    )
    fast.model_input_names = ["input_ids", "attention_mask"]
    fast.save_pretrained(directory)
    changes: dict[str, Any] = {"pad_token_id": 1, "max_position_embeddings": 24}
    changes |= {"num_labels": 1} if "Classification" in name else {}
    theirs_of(name, **changes).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["Bert", "XLMRoberta", "MPNet"])
def sentence_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A SentenceTransformer with mean pooling, without dropout, over each of the families."""
    library = pytest.importorskip("sentence_transformers", reason="its models are patched here")
    directory = write_model(tmp_path_factory.mktemp(request.param), f"{request.param}Model")
    return with_dropout(library.SentenceTransformer(str(directory), device="cpu"), 0.0)


def test_vectors_of_a_sentence_transformer(sentence_model: Any) -> None:
    ours = copy.deepcopy(sentence_model)
    report = fasttfm.patch(ours)
    assert report.model == "SentenceTransformer"

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"vectors": module(module.preprocess(TEXTS))["sentence_embedding"]}

    check_patched(ours, sentence_model, call)
    check(encode(ours), sentence_model, encode)
    fasttfm.unpatch(ours)
    assert (encode(ours) == encode(sentence_model)).all()


def test_training_on_pairs(sentence_model: Any) -> None:
    """The library's own loss over in-batch negatives: its value and all gradients."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    ours = copy.deepcopy(sentence_model).train()
    theirs = copy.deepcopy(sentence_model).train()
    fasttfm.patch(ours)
    ours, theirs = (MultipleNegativesRankingLoss(each) for each in (ours, theirs))

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        others = (TEXTS[shift:] + TEXTS[:shift] for shift in range(len(TEXTS)))  # one number may be exact by chance
        sides = ([module.model.preprocess(texts) for texts in (TEXTS, other)] for other in others)
        return {"losses": torch.stack([module(each, torch.zeros(len(TEXTS))) for each in sides])}

    check_patched(ours, theirs, call)


def test_the_trainer_of_sentence_transformers(sentence_model: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets", reason="the trainer's examples are one")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    ours = copy.deepcopy(sentence_model)
    fasttfm.patch(ours)
    before = ours.encode(TEXTS)
    options = {"num_train_epochs": 1, "per_device_train_batch_size": 5, "learning_rate": 1e-2, "use_cpu": True}
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = library.SentenceTransformerTrainer(
        ours,
        library.SentenceTransformerTrainingArguments(str(tmp_path), **options),
        train_dataset=datasets.Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[::-1]}),
        loss=MultipleNegativesRankingLoss(ours),
    )
    trainer.train()
    assert (ours.encode(TEXTS) != before).any()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    attention = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: found.append(kwargs) or attention(*args, **kwargs))
    return found


@pytest.mark.parametrize("name", ["BertModel", "XLMRobertaModel"])
def test_unpadded_inputs_of_sentence_transformers(name: str, tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    """With ``fasttfm_flash`` the library flattens its inputs, and a patched model takes them as they are."""
    library = pytest.importorskip("sentence_transformers", reason="its models are patched here")
    directory = str(write_model(tmp_path, name))
    fasttfm.register_attention()
    flat = library.SentenceTransformer(directory, device="cpu", model_kwargs={"attn_implementation": "fasttfm_flash"})
    assert flat[0].can_flatten_inputs
    assert flat.preprocess(TEXTS)["input_ids"].shape[0] == 1
    padded = library.SentenceTransformer(directory, device="cpu")
    check(encode(flat), padded, encode)
    assert len(calls) == 2
    assert calls[0]["cu_seqlens"].numel() == len(TEXTS) + 1
    fasttfm.patch(flat)
    assert flat[0].model.config._attn_implementation == "fasttfm_flash"
    check(encode(flat), padded, encode)
    assert len(calls) == 2  # one stack of layers, no attention of its own

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"vectors": module(module.preprocess(TEXTS))["sentence_embedding"]}

    check_patched(*(with_dropout(each, 0.0).eval() for each in (flat, padded)), call)


def test_a_cross_encoder(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="its models are patched here")
    directory = write_model(tmp_path, "XLMRobertaForSequenceClassification")
    ours, theirs = (library.CrossEncoder(str(directory), device="cpu") for _ in range(2))
    report = fasttfm.patch(ours)
    assert report.model == "CrossEncoder"

    def predict(model: Any) -> Any:
        return model.predict(list(zip(TEXTS, TEXTS[::-1], strict=True)))

    check(predict(ours), theirs, predict)
    fasttfm.unpatch(ours)
    assert (predict(ours) == predict(theirs)).all()


def test_a_peft_model() -> None:
    peft = pytest.importorskip("peft", reason="its models are patched here")
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False, lora_dropout=0.0)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(with_dropout(theirs_of("BertForSequenceClassification"), 0.0), config)
    ours = copy.deepcopy(theirs)
    report = fasttfm.patch(ours)
    assert report.model == "PeftModel"
    assert re.search(r"run PEFT's code, \d+ of them here", report.left["linear layers with adapters"])
    assert not [name for name in report.left if name.startswith("activation")]  # that of the pooler is not reported
    given = batch("BertForSequenceClassification")
    check_patched(ours.train(), theirs.train(), caller(given, "loss"))
    merged = ours.merge_and_unload()
    fasttfm.unpatch(merged)


def test_a_module_that_holds_models() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.other = theirs_of("BertModel"), theirs_of("XLMRobertaModel"), None

    module = Two()
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    module.other = transformers.T5EncoderModel(transformers.T5Config(**sizes))
    report = fasttfm.patch(module)
    assert report.left["T5EncoderModel"] == "fasttfm.patch does not know the family"
    assert {type(each).__module__ for each in (module.first.encoder, module.second.encoder)} == {
        "fasttfm.patching.bert",
        "fasttfm.patching.xlm_roberta",
    }
    fasttfm.unpatch(module)
    with pytest.raises(ValueError, match="got a Two that is not patched"):
        fasttfm.unpatch(module)
    with pytest.raises(TypeError, match=r"or a module that holds one, got transformers.*T5EncoderModel"):
        fasttfm.patch(module.other)
