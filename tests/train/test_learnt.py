"""The examples that a run prints: sentences with a masked token, and the guesses of the model and of word
frequencies."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from train_runs import run_of, settings_of

from fasttfm import data
from fasttfm.models.objectives import CausalLM, MaskedLM
from fasttfm.train.learnt import GuessedWord, Learnt, learnt, predicted, word_shares
from fasttfm.train.pretrain import open_corpus, pretrain


class Model(torch.nn.Module):
    """Predicts the masked token, which it looks up in the text, and records its inputs."""

    def __init__(self, texts: Any) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.text = [texts.held_out.document(number).tolist() for number in range(texts.held_out.documents)]
        self.size, self.given = texts.tokenizer.vocab_size, []  # type: tuple[int, list[list[int]]]

    @property
    def encoder(self) -> Model:
        return self

    transformer = encoder

    def encode(self, ids: Tensor, *_: Any, **__: Any) -> Any:
        assert not self.training
        self.given.append(ids.tolist())
        return SimpleNamespace(x=torch.arange(len(ids)))

    def lm_head(self, position: Tensor) -> Tensor:
        return 20.0 * torch.nn.functional.one_hot(torch.tensor(self._missing(self.given[-1], int(position))), self.size)

    def _missing(self, ids: list[int], position: int) -> int:
        masked = ids[position + 1 :] != []
        before = ids[1:position] if masked else ids  # without [CLS]
        after = ids[position + 1 : -1] if masked else []
        for document in self.text:
            for start in range(len(document) - len(before) - len(after)):
                end = start + len(before)
                if document[start:end] == before and document[end + 1 : end + 1 + len(after)] == after:
                    return int(document[end])
        raise AssertionError("no such position")


@pytest.mark.parametrize(("family", "kind"), [("bert", MaskedLM), ("gpt2", CausalLM)])
def test_guesses_are_for_the_masked_words(family: str, kind: Any, corpus: dict[str, Path], tmp_path: Path) -> None:
    texts = open_corpus(settings_of(corpus, family), run_of(tmp_path), tmp_path / "tokenizer", load=False)
    model = Model(texts)
    objective = kind(model)
    examples = data.SequenceFormat("nsp" if family == "bert" else "causal", 64)
    batch = next(iter(data.BatchStream(texts.held_out, examples, tokens_per_batch=256, seed=0)))
    shown = learnt(objective, texts.tokenizer, texts.training, texts.held_out, [batch], 1.25, words=3)
    assert shown.what == ("masked tokens" if family == "bert" else "next tokens")
    assert len(shown.words) == len(model.given) == 3
    assert objective.training  # as before
    whole = corpus["data"].read_text()
    for each in shown.words:
        assert each.guesses[0][0] == each.word
        assert each.guesses[0][1] > 0.9
        text = f"{each.before} {each.word} {each.after}".strip().rstrip(".")
        assert text in (whole.lower() if family == "bert" else whole)
        assert bool(each.after) == (family == "bert")
    shares = word_shares(texts.training, texts.tokenizer)
    assert math.isclose(shares.sum(), 1)
    assert len(predicted(batch)) == batch.predictions
    assert math.isclose(shown.frequency_loss, -np.log(shares[predicted(batch)]).mean())
    best = int(shares.argmax())
    assert shown.frequent[0] == (texts.tokenizer.decode([best]).strip(), shares[best])


def test_the_printed_lines() -> None:
    word = GuessedWord("the united", "states", "of america.", [("states", 0.9), ("nations", 0.05)])
    text = str(Learnt("masked tokens", 5.0, 6.5, [word], [("the", 0.06), ("of", 0.04)]))
    assert text.splitlines() == [
        "masked tokens of the validation set: loss 5.00, 1.50 below that of word frequencies (6.50)",
        "  the united [states] of america.",
        "      model: states 90%, nations 5%    word frequencies: the 6%, of 4%",
    ]
    assert "next tokens of the validation set: loss 7.00, 0.50 above" in str(Learnt("next tokens", 7.0, 6.5, [], []))


@pytest.mark.parametrize("family", ["roberta", "gpt2", "electra"])
def test_language_models_show_their_guesses(family: str, corpus: dict[str, Path], tmp_path: Path) -> None:
    summary = pretrain(settings_of(corpus, family, steps=2), run_of(tmp_path))
    assert summary is not None
    if family == "electra":
        assert summary.learnt is None
        return
    assert summary.learnt is not None
    assert summary.learnt.loss == summary.held_out["masked_lm" if family == "roberta" else "causal_lm"]
    assert len(summary.learnt.words) == 4
