"""GPT-1's symmetric pairs: both orders are read, and their hidden states are added."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fasttfm.data.task_files import TextExample
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare
from fasttfm.tasks.rates import Rates

PAIRS = [
    TextExample("Peace and commerce.", "War.", "no"),
    TextExample("The army.", "The navy of the United States.", "yes"),
    TextExample("A war.", "War.", "yes"),
]
SWAPPED = [TextExample(pair.second or "", pair.first, pair.label) for pair in PAIRS]


def test_states_of_both_orders_are_added(gpt_directory: Path) -> None:
    model, task = prepare("pair", gpt_directory, PAIRS, both_orders=True, new_head=True)
    _, plain = prepare("pair", gpt_directory, PAIRS)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that attention is far from uniform, which would not see the order
        logits = task.logits(model, task.batch(task.features(PAIRS)))
        one, other = (plain.logits(model, plain.batch(plain.features(pairs))) for pairs in (PAIRS, SWAPPED))
        swapped = task.logits(model, task.batch(task.features(SWAPPED)))
    # The head has no bias: the sum of the states' logits is that of the sum.
    assert logits.shape == (3, 2)
    assert torch.allclose(logits, one + other, atol=1e-5)
    assert torch.allclose(logits, swapped, atol=1e-5)
    assert float((one - other).abs().max()) > 1e-3


def test_training_reads_both_orders(gpt_directory: Path) -> None:
    torch.manual_seed(0)
    model, task = prepare("pair", gpt_directory, PAIRS, both_orders=True)
    settings = FinetuneSettings(rates=Rates(5e-3), epochs=15)
    FineTuning(model, task, PAIRS, settings).run(on_results=lambda results: None)
    assert predict(model, task, SWAPPED) == [pair.label for pair in PAIRS]
    assert task.description()["both_orders"]


def test_an_encoder_reads_both_texts_at_once(bert_directory: Path) -> None:
    with pytest.raises(ValueError, match="both_orders: expected with a GPT, got BERT"):
        prepare("pair", bert_directory, PAIRS, both_orders=True)
