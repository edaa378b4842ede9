"""Patched models on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from patched_models import CAUSAL, LANGUAGE_MODELS, MASKS, batch, pair
from torch import Tensor

import fasttfm
from fasttfm.testing import compare
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
GPT_SIZES = {"n_embd": 128, "n_head": 2}


def on_gpu(name: str, mask: str = "right", **changes: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    sizes = GPT_SIZES if "GPT" in name else SIZES
    ours, theirs = (module.cuda().train() for module in pair(name, **sizes, **changes))
    return ours, theirs, {key: value.cuda() for key, value in batch(name, mask).items()}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_autocast_loss_and_gradients(name: str, mask: str) -> None:
    """No less accurate than transformers' model under autocast, by the tolerance rule."""
    ours, theirs, given = on_gpu(name, mask)
    exact = copy.deepcopy(theirs).double()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        losses = {"found": ours(**given).loss, "naive": theirs(**given).loss}
    losses["exact"] = exact(**given).loss
    for loss in losses.values():
        loss.backward()
    comparison = compare("loss", losses["found"].bfloat16(), losses["naive"].bfloat16(), losses["exact"], OUTPUT_FACTOR)
    assert comparison.ok, str(comparison)
    parameters = zip(ours.parameters(), theirs.parameters(), exact.parameters(), strict=True)
    triples = [[parameter.grad for parameter in each] for each in parameters]
    # In bf16: the floor of the rule is a step of the type that was computed in.
    checked = [
        compare("gradient", found.bfloat16(), naive.bfloat16(), truth, GRADIENT_FACTOR)
        for found, naive, truth in triples
    ]
    bound = max(each.bound for each in checked)
    assert all(each.error <= bound for each in checked), [str(each) for each in checked if not each.error <= bound]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_evaluation_gives_logits(name: str) -> None:
    ours, theirs, given = on_gpu(name)
    ours, theirs = ours.eval().bfloat16(), theirs.eval().bfloat16()
    kept = given["attention_mask"].bool()
    exact = copy.deepcopy(theirs).double()
    found, naive, truth = (module(**given).logits[kept] for module in (ours, theirs, exact))
    comparison = compare("logits", found, naive, truth, OUTPUT_FACTOR)
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_a_step_without_mask_does_not_synchronize(name: str) -> None:
    """A masked-LM loss synchronizes for the number of its labels; a causal LM loss has no such number."""
    ours, _, given = on_gpu(name, "full")
    ours.config.pad_token_id = None  # without a mask, transformers itself searches for it on the host
    if name != CAUSAL:
        del given["labels"]

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = ours(**given)
        (output.logits.float().mean() if output.loss is None else output.loss).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unpatch_restores_the_bits() -> None:
    ours, theirs, given = on_gpu("BertForMaskedLM")
    fasttfm.unpatch(ours)
    assert torch.equal(ours.eval()(**given).logits, theirs.eval()(**given).logits)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_compiled_by_inductor(name: str) -> None:
    torch._dynamo.reset()
    ours, _, given = on_gpu(name)
    compiled = torch.compile(ours, fullgraph=True)
    losses = []
    for call in (ours, compiled):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = call(**given).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)  # bf16, in another order


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "own"])
def test_a_mask_synchronizes_once(patched: bool) -> None:
    """Forward, backward and optimizer step. Without a mask, or with lengths, nothing synchronizes."""
    import warnings

    given = {key: value.cuda() for key, value in batch("BertForSequenceClassification").items()}
    if patched:
        model = pair("BertForSequenceClassification", **SIZES)[0].cuda().train()
    else:
        sizes = SIZES | {"vocab_size": 1 + int(given["input_ids"].max()), "num_hidden_layers": 2}
        config = fasttfm.models.BertConfig(**sizes)
        model = fasttfm.models.BertForSequenceClassification(config).cuda().train()
    optimizer = fasttfm.optim.AdamW(model.parameters(), max_norm=1.0, weight_copies=True)

    def synchronizations(**arguments: Any) -> int:
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(**arguments).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(each.message) for each in found)

    without = {key: value for key, value in given.items() if key != "attention_mask"}
    for _ in range(2):  # the first step compiles and makes states
        synchronizations(**given)
    assert synchronizations(**given) == 1
    assert synchronizations(**without) == 0
    if not patched:
        assert synchronizations(**without, lengths=given["attention_mask"].sum(1).tolist()) == 0
