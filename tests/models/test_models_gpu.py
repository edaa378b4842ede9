"""Models on a GPU: the results of the CPU, padded and packed, without synchronization."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import config_of, wide
from torch import Tensor

from fasttfm import models
from fasttfm.testing.modules import check_modules

pytestmark = pytest.mark.gpu

B, S, V = 6, 96, 1000
LENGTHS = [96, 12, 55, 1, 80, 33]
CONFIG = {
    "vocab_size": V,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": S,
}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, V, (B, S), generator=generator)
    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    predicted = (torch.rand(B, S, generator=generator) < 0.15) & mask
    found = {"ids": ids, "mask": mask, "labels": torch.where(predicted, ids, -100)}
    return {name: value.cuda() for name, value in found.items()}


def model(name: str = "BertForPreTraining", **changes: Any) -> Any:
    torch.manual_seed(0)
    return getattr(models, name)(config_of(models, name, {**CONFIG, **changes})).cuda()


DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
NARROW = {"embedding_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "BertForPreTraining": {},
    "AlbertForPreTraining": {**NARROW, "classifier_dropout_prob": 0.0},
    "ElectraForMaskedLM": NARROW,
    "ElectraForPreTraining": NARROW,
    "DistilBertForMaskedLM": {},
    "ModernBertForMaskedLM": {"local_attention": 16, "pad_token_id": 0},  # drops nothing by default
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_same_numbers_as_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    dropout = () if name.startswith("ModernBert") else DROPOUT
    ours = model(name, **FAMILIES[name], **dict.fromkeys(dropout, 0.0)).to(dtype)
    ours.save_pretrained(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path, dtype=dtype).cuda().train()
    given = batch()
    labels = {"labels": given["labels"]}
    if name == "ElectraForPreTraining":
        labels = {"labels": (given["labels"] != -100).long()}
    elif name.endswith("PreTraining"):
        pairs = "sentence_order_label" if name.startswith("Albert") else "next_sentence_label"
        labels[pairs] = torch.tensor([0, 1, 0, 1, 1, 0]).cuda()

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": wide(module(given["ids"], attention_mask=given["mask"], **labels).loss)}

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


def test_padded_and_packed_drop_the_same() -> None:
    module = model("BertForMaskedLM")
    given = batch()
    mask = given["mask"]
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    losses = []
    for call in (
        lambda: module(given["ids"], mask, labels=given["labels"]),
        lambda: module(given["ids"], lengths=LENGTHS, labels=given["labels"]),
        lambda: module(given["ids"][mask], cu_seqlens=cu_seqlens, max_seqlen=S, labels=given["labels"][mask]),
    ):
        torch.manual_seed(7)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            losses.append(call().loss)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ElectraForJointPreTraining"])
def test_a_step_does_not_synchronize(name: str) -> None:
    module = model(name)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    given = batch()
    packed_labels = given["labels"][given["mask"]]
    positions = (packed_labels != -100).nonzero().squeeze(1)
    labels = packed_labels[positions]

    def step() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = module(given["ids"], lengths=LENGTHS, labels=labels, positions=positions).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [step() for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all()
    assert losses[-1] < first


def test_copies_on_other_devices_agree() -> None:
    module = model(**dict.fromkeys(DROPOUT, 0.0)).eval()
    given = batch()
    on_gpu = module(given["ids"], given["mask"])
    on_cpu = copy.deepcopy(module).cpu()(given["ids"].cpu(), given["mask"].cpu())
    difference = (on_gpu.seq_relationship_logits.cpu() - on_cpu.seq_relationship_logits).abs().max()
    assert difference < 1e-2 * on_cpu.seq_relationship_logits.abs().max()  # TF32 may be on
