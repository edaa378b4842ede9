"""The step in plain torch, against which `fasttfm pretrain` times its own, is the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fasttfm import models
from fasttfm.cli import torch_step
from fasttfm.data import Batch

BERT = {
    "bert.embeddings.norm.": "norm.",
    "bert.embeddings.": "",
    "bert.encoder.": "",
    "lm_head.dense.": "dense.",
    "lm_head.norm.": "head_norm.",
    "lm_head.decoder.bias": "bias",
}
GPT = {"transformer.embeddings.": "", "transformer.encoder.final_norm.": "norm.", "transformer.encoder.": ""}


def bert() -> models.BertConfig:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return models.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes, **dropout)


def gpt() -> models.GPT2Config:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return models.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_head=2, n_layer=2, **dropout)


def batch() -> Batch:
    return Batch(
        input_ids=torch.arange(14) + 5,
        token_type_ids=None,
        cu_seqlens=torch.tensor([0, 9, 14], dtype=torch.int32),
        max_seqlen=64,
        positions=torch.tensor([1, 7, 10]),
        labels=torch.tensor([3, 49, 20]),
        sentence_labels=None,
        tokens=14,
        predictions=3,
    )


def renamed(name: str, names: dict[str, str]) -> str:
    for prefix, other in names.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


@pytest.mark.parametrize(("config", "names"), [(bert(), BERT), (gpt(), GPT)], ids=["bert", "gpt2"])
def test_both_steps_have_the_same_loss(config: Any, names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[torch.nn.Module, Any]] = []
    monkeypatch.setattr(torch_step, "_step", lambda model, loss, device: steps.append((model, loss)))
    device = torch.device("cpu")
    torch_step._ours(config, batch(), device)
    torch_step._theirs(config, batch(), device)
    (ours, our_loss), (theirs, their_loss) = steps
    state = {renamed(name, names): value for name, value in ours.state_dict().items()}
    theirs.load_state_dict({name: value for name, value in state.items() if name in theirs.state_dict()})
    torch.testing.assert_close(our_loss(), their_loss())


def test_times_and_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_step, "_SECONDS", 0.0)
    times = torch_step.compare_steps(gpt(), batch(), torch.device("cpu"))
    assert times.ours > 0
    assert times.torch > 0
    shown = str(torch_step.StepTimes(0.010, 0.025))
    assert shown.endswith("fasttfm 10.0 ms, plain torch 25.0 ms, 2.50 times as long")
