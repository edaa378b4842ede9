"""A family is one file: a vision model without token ids and tokenizer is listed where it fits and refused
elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fasttfm import models
from fasttfm.cli import pretrain as pretrain_command
from fasttfm.cli.main import main
from fasttfm.inference.opening import family_of, model_class, open_model
from fasttfm.models.checkpoint_names import Names
from fasttfm.models.families import FAMILIES, family_of_type, trained_on_text
from fasttfm.models.family import Family, Head
from fasttfm.models.objectives import Pretraining
from fasttfm.patching import patch
from fasttfm.tasks.finetuning import prepare
from fasttfm.train.pretrain import pretrain
from fasttfm.train.settings import PretrainSettings, RunSettings, ScheduleSettings

# ---- the family: what would be fasttfm/models/toy.py -----------------------------------------------------------------


@dataclass
class ToyConfig(models.config.ModelConfig):
    model_type: ClassVar[str] = "toy"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {"base": {}}

    width: int = 8


class ToyModel(models.pretrained.PretrainedModel):
    """Patches of an image as vectors."""

    config_class, names, base = ToyConfig, Names(prefix="toy", base=(), heads=()), True

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.patches = nn.Conv2d(3, config.width, 4, stride=4)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.patches(pixels).flatten(2).mT


class Reconstruction(Pretraining):
    terms = ("pixels",)


FAMILY = Family("Toy", ToyConfig, {Head.NONE: ToyModel, Head.SEQUENCE_CLASSIFICATION: ToyModel})

# ---- where it is listed ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The line in FAMILIES, and a checkpoint of the family."""
    monkeypatch.setitem(FAMILIES, FAMILY.name, FAMILY)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy"}))
    return tmp_path


def choices(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["pretrain", "--help"])
    return capsys.readouterr().out.partition("positional arguments:")[2].partition("}")[0]


def test_its_checkpoints_are_recognized(toy: Path) -> None:
    assert family_of(toy) is FAMILY
    assert model_class(FAMILY, Head.NONE) is ToyModel
    assert ToyModel(ToyConfig())(torch.zeros(1, 3, 8, 8)).shape == (1, 4, 8)
    with pytest.raises(ValueError, match=r"masked tokens: expected a model of bert, .*; toy has no head for it"):
        open_model(toy, Head.MASKED_LM)


def test_pretraining_on_text_refuses_it(capsys: pytest.CaptureFixture[str], toy: Path) -> None:
    assert FAMILY.name not in trained_on_text()
    assert "toy" not in choices(capsys)
    with pytest.raises(ValueError, match="model: Toy has no pre-training objective on text"):
        pretrain(PretrainSettings("toy", "base", ScheduleSettings(1)), RunSettings(toy / "run"))


def test_pretraining_offers_it_once_it_reads_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = replace(FAMILY, pretraining=Reconstruction, sequences="single", tokenizer="bpe")
    monkeypatch.setitem(FAMILIES, "toy", reading)
    assert trained_on_text()["toy"] is reading
    assert "toy" in choices(capsys)
    assert pretrain_command.FAMILIES["toy"].default_size == "base"


def test_tasks_on_text_refuse_it(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="tag: expected a model that reads text, got Toy, which has no tokenizer"):
        prepare("tag", toy, [])
    reading = replace(FAMILY, tokenizer="bpe")
    monkeypatch.setitem(FAMILIES, "toy", reading)
    with pytest.raises(ValueError, match=r"tag: expected a model of bert, .*; toy has no head for it"):
        prepare("tag", toy, [])


def test_patching_names_it_once_it_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(
        TypeError, match=r"RoBERTa, XLM-RoBERTa, CamemBERT, MPNet, .*, ModernBERT, EuroBERT, NomicBERT or GPT-2 of"
    ):
        patch(nn.Linear(2, 2))
    monkeypatch.setitem(FAMILIES, "toy", replace(FAMILY, patching="toy"))
    with pytest.raises(TypeError, match=r"expected a BERT, .*, GPT-2 or Toy of transformers"):
        patch(nn.Linear(2, 2))


def test_types_and_names() -> None:
    assert family_of_type("openai-gpt") is FAMILIES["gpt"]
    assert family_of_type("bart") is None
    assert list(trained_on_text()) == [
        *("bert", "roberta", "xlm-roberta", "camembert", "albert", "electra", "distilbert", "modernbert"),
        *("eurobert", "nomic_bert"),
        *("gpt", "gpt2", "gpt3"),
    ]
