"""GPTs on a GPU: the results of transformers, and generation that does not synchronize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import wide
from torch import Tensor

from fasttfm import models, ops
from fasttfm.generate import CachedDecoder
from fasttfm.nn import PackedBatch
from fasttfm.testing import compare
from fasttfm.testing.modules import check_modules
from fasttfm.testing.tolerance import OUTPUT_FACTOR

pytestmark = pytest.mark.gpu

B, S, V = 6, 96, 1000
LENGTHS = [96, 12, 55, 1, 80, 33]
SIZES = {"vocab_size": V, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def ids() -> Tensor:
    return torch.randint(5, V, (B, S), generator=torch.Generator().manual_seed(0)).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_numbers_as_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = models.GPT2LMHeadModel(models.GPT2Config(**SIZES, **NO_DROPOUT)).cuda().to(dtype)
    ours.save_pretrained(tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=dtype).cuda().train()
    words = ids()
    mask = torch.arange(S, device="cuda") < torch.tensor(LENGTHS, device="cuda")[:, None]

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": wide(module(words, attention_mask=mask, labels=words.where(mask, -100)).loss)}

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


@pytest.mark.parametrize("family", ["GPT2", "GPT3", "OpenAIGPT"])
def test_steps_do_not_synchronize_and_give_the_states_of_whole_sequences(family: str) -> None:
    torch.manual_seed(0)
    local = {"local_window": 20} if family == "GPT3" else {}
    module = getattr(models, f"{family}Model")(getattr(models, f"{family}Config")(**SIZES, **local)).cuda().eval()
    words, following = ids(), ids()[:, :8].flip(0)
    batch = PackedBatch.of(words, lengths=LENGTHS)
    with torch.no_grad():
        decoder = CachedDecoder(module, S + 8)
        states = [decoder.read(batch.pack(words), batch), decoder.step(following[:, 0])]
        torch.cuda.set_sync_debug_mode("error")
        try:
            states += [decoder.step(following[:, index]) for index in range(1, 8)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = torch.stack(states, 1)
        for row, length in enumerate(LENGTHS):
            whole = torch.cat([words[row, :length], following[row]])[None]
            expected = module(whole).last_hidden_state[0, length - 1 :]
            exact = module.double()(whole).last_hidden_state[0, length - 1 :]
            module.float()
            comparison = compare("states", found[row], expected, exact, OUTPUT_FACTOR)
            assert comparison.ok, str(comparison)


def test_a_choice_outside_its_sequence_is_reported_without_synchronizing() -> None:
    module = models.GPT2DoubleHeadsModel(models.GPT2Config(**SIZES)).cuda().eval()
    words = ids().view(3, 2, S)
    good = torch.zeros(3, 2, dtype=torch.int64, device="cuda")
    bad = good.clone()
    bad[1, 1] = S
    assert module(words, mc_token_ids=good).mc_logits.isfinite().all()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = module(words, mc_token_ids=bad).mc_logits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.isnan().flatten().tolist() == [False, False, False, True, False, False]
    with pytest.raises(ValueError, match=rf"mc_token_ids: expected indices in \[0, {S}\), got {S} at sequence 3"):
        ops.check_errors()
    assert module(words, mc_token_ids=good).mc_logits.isfinite().all()
