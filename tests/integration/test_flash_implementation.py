"""``attn_implementation="fasttfm_flash"``: features that transformers and sentence-transformers have only for
FlashAttention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_parity import PAD, theirs_of
from patched_models import IDS, MASKS, check_patched, with_dropout
from torch import Tensor

import fasttfm
from fasttfm import ops

transformers = pytest.importorskip("transformers")
fasttfm.register_attention()
from transformers.modeling_flash_attention_utils import _flash_attention_forward, lazy_import_flash_attention  # noqa: E402

NAME = "fasttfm_flash"
LENGTHS = (5, 1, 8, 2)
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {f"{kind}_token_id": PAD for kind in ("pad", "bos", "eos", "cls", "sep")}


def twins(theirs: Any) -> tuple[Any, Any]:
    theirs = with_dropout(theirs, 0.0)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(NAME)
    return ours, theirs


def modern_bert(window: int = 4) -> tuple[Any, Any]:
    """One layer with full attention, and one with a window."""
    sizes = {**SIZES, "vocab_size": 61, "max_position_embeddings": 32, "local_attention": window, **SPECIAL}
    config = transformers.ModernBertConfig(**sizes, global_attn_every_n_layers=2, attn_implementation="sdpa")
    torch.manual_seed(3)
    return twins(transformers.ModernBertForMaskedLM(config).eval())


def decoder(**changes: Any) -> tuple[Any, Any]:
    """A causal decoder with a window and one key head."""
    sizes = {**SIZES, "vocab_size": 61, "num_key_value_heads": 1, "sliding_window": 4, **SPECIAL}
    config = transformers.MistralConfig(**{**sizes, **changes}, attn_implementation="sdpa")
    torch.manual_seed(3)
    return twins(transformers.MistralForCausalLM(config).eval())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call of attention."""
    found: list[dict[str, Any]] = []
    attention = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: found.append(kwargs) or attention(*args, **kwargs))
    return found


def flattened(start: int = 0, **options: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """A flattened batch of transformers' collator, and its sequences one by one."""
    sequences = [IDS[row, :length] for row, length in enumerate(LENGTHS)]
    collator = transformers.DataCollatorWithFlattening(position_ids_start=start, **options)
    return collator([{"input_ids": each.tolist()} for each in sequences]), sequences


# ---- padded batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("make", [modern_bert, decoder])
def test_windows_under_masks(make: Any, mask: str, calls: list[dict[str, Any]]) -> None:
    """Windows do not count padding between tokens, as in FlashAttention."""
    ours, theirs = make()
    tokens = MASKS[mask].bool()
    if mask == "anywhere":  # only at both ends
        tokens = (torch.arange(16) >= 3) & MASKS["right"].bool() | (torch.arange(16) == 3)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"states": module(IDS, attention_mask=tokens.long()).logits[tokens]}

    check_patched(ours, theirs, call)
    windows = {each["window"] for each in calls}
    assert windows == ({(-1, -1), (2, 2)} if make is modern_bert else {(3, 3)})


def test_the_fasttfm_implementation_reads_windows_from_masks() -> None:
    ours, theirs = decoder()
    ours.set_attn_implementation("fasttfm")
    check_patched(ours, theirs, lambda module, _: {"states": module(IDS).logits})


def test_generation_with_a_window() -> None:
    ours, theirs = decoder()
    prompts, mask = IDS[:4, :7], (torch.arange(7) >= torch.tensor([0, 3, 6, 1])[:, None]).long()
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(prompts, **options), theirs.generate(prompts, **options))


def test_weights_of_a_window() -> None:
    ours, theirs = modern_bert()
    theirs.set_attn_implementation("eager")

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = module(IDS, output_attentions=True).attentions
        return {f"weights {layer}": each for layer, each in enumerate(weights)}

    check_patched(ours, theirs, call)


# ---- flattened batches -----------------------------------------------------------------------------------------------


def check_flattened(ours: Any, theirs: Any, given: dict[str, Any], sequences: list[Tensor]) -> None:
    """Outputs and gradients of a flattened batch against the model over each sequence."""
    labels = given.pop("labels")
    assert labels.shape == given["input_ids"].shape

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        if module.config._attn_implementation == NAME:
            return {"states": module(**given)[0][0]}
        return {"states": torch.cat([module(each[None])[0][0] for each in sequences])}

    check_patched(ours, theirs, call)


@pytest.mark.parametrize("boundaries", [False, True])
def test_a_flattened_batch_of_a_decoder(boundaries: bool, calls: list[dict[str, Any]]) -> None:
    ours, theirs = decoder()
    given, sequences = flattened(return_flash_attn_kwargs=boundaries)
    check_flattened(ours, theirs, given, sequences)
    assert all(each["cu_seqlens"].tolist() == [0, 5, 6, 14, 16] and each["max_seqlen"] == 8 for each in calls)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertModel", "RobertaModel"])
def test_a_flattened_batch_of_the_families(name: str, calls: list[dict[str, Any]]) -> None:
    ours, theirs = twins(theirs_of(name, attn_implementation="sdpa"))
    start = theirs.config.pad_token_id + 1 if name == "RobertaModel" else 0
    given, sequences = flattened(start, return_flash_attn_kwargs=True, return_seq_idx=True)
    check_flattened(ours, theirs, given, sequences)
    assert calls
    assert all(each["cu_seqlens"].tolist() == [0, 5, 6, 14, 16] for each in calls)


def test_a_flattened_batch_of_modern_bert() -> None:
    ours, theirs = modern_bert()
    check_flattened(ours, theirs, *flattened(return_flash_attn_kwargs=True))


@pytest.mark.parametrize("implementation", ["fasttfm", NAME])
def test_documents_in_rows_of_a_batch(implementation: str, calls: list[dict[str, Any]]) -> None:
    """Position ids that restart, in several rows."""
    ours, theirs = decoder(sliding_window=None)
    ours.set_attn_implementation(implementation)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(16 - n)]) for n in (6, 1)])

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": module(IDS[:2], position_ids=positions, use_cache=False).logits}

    check_patched(ours, theirs, call)
    assert all(each["cu_seqlens"].tolist() == [0, 6, 16, 17, 32] for each in calls)


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_position_ids_that_change_in_place(inference: bool, calls: list[dict[str, Any]]) -> None:
    """A caller may write the positions of every batch into the same tensor."""
    ours, _ = decoder(sliding_window=None)
    with torch.inference_mode(inference), torch.no_grad():
        positions = torch.zeros(1, 16, dtype=torch.int64)
        for length in (6, 1):
            positions.copy_(torch.cat([torch.arange(length), torch.arange(16 - length)]))
            calls.clear()
            ours(IDS[:1], position_ids=positions)
            assert [each["cu_seqlens"].tolist() for each in calls] == [[0, length, 16]] * 2


def test_attention_weights_of_packed_documents() -> None:
    ours, theirs = decoder()
    theirs.set_attn_implementation("eager")
    given = flattened()[0]
    given.pop("labels")

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = module(**given, output_attentions=True, use_cache=False).attentions
        return {f"weights {layer}": each for layer, each in enumerate(weights)}

    check_patched(ours, theirs, call)


def test_trainer_without_padding(tmp_path: Any) -> None:
    """Trainer with the collator that flattens: the loss of the first step is that of the sequences one by one."""
    pytest.importorskip("accelerate", reason="Trainer needs it")
    ours, theirs = decoder()
    sequences = [{"input_ids": IDS[row, :length].tolist()} for row, length in enumerate(LENGTHS)]
    options = {"per_device_train_batch_size": 4, "max_steps": 1, "logging_steps": 1, "learning_rate": 0.0}
    options |= {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    trainer = transformers.Trainer(
        ours,
        transformers.TrainingArguments(str(tmp_path), **options),
        train_dataset=sequences,
        data_collator=transformers.DataCollatorWithFlattening(),
    )
    trainer.train()
    logits = [theirs(torch.tensor([each["input_ids"]])).logits[0] for each in sequences]
    targets = [torch.tensor(each["input_ids"]) for each in sequences]
    expected = torch.nn.functional.cross_entropy(
        torch.cat([each[:-1] for each in logits]), torch.cat([each[1:] for each in targets])
    )
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)  # it is logged rounded


# ---- the functions that transformers looks up ------------------------------------------------------------------------


def test_the_functions_that_transformers_looks_up() -> None:
    """Through transformers' own way from padded tensors to the varlen function."""
    (dense, varlen, paged, *_), _ = lazy_import_flash_attention(NAME)
    assert paged is None
    assert (dense.__name__, varlen.__name__) == ("flash_attn_func", "flash_attn_varlen_func")
    q, k, v = torch.randn(3, 4, 16, 2, 8, generator=torch.Generator().manual_seed(0))
    mask = MASKS["right"][:4].bool()
    options = {"query_length": 16, "is_causal": True, "sliding_window": 4, "attn_implementation": NAME}
    found = _flash_attention_forward(q, k, v, mask, **options)
    expected = ops.attention(q, k, v, causal=True, window=(3, 0), lengths=mask.sum(1).int())
    torch.testing.assert_close(found, expected)
    found = _flash_attention_forward(q, k, v, None, **options)
    torch.testing.assert_close(found, ops.attention(q, k, v, causal=True, window=(3, 0)))
    for name in ("softcap", "s_aux"):
        with pytest.raises(ValueError, match=f"{name}: expected nothing"):
            _flash_attention_forward(q, k, v, None, **options, **{name: torch.ones(1)})


def test_other_implementations_are_not_changed() -> None:
    with pytest.raises((ImportError, ValueError)):
        lazy_import_flash_attention("flash_attention_9")
    lazy_import_flash_attention(NAME)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "cache", "block_table"])
def test_what_is_not_supported_is_refused(name: str) -> None:
    ours, _ = modern_bert()
    with pytest.raises(ValueError, match=f'"{NAME}": {name}: expected None'):
        ours(IDS, **{name: torch.ones(1)})


def test_positions_of_an_inference_serve_training() -> None:
    """Where sequences start is read once for a tensor of position ids, whichever mode the first call has."""
    ours, _ = decoder()
    ids, positions = IDS[:1], torch.cat([torch.arange(6), torch.arange(10)])[None]
    with torch.inference_mode():
        ours(ids, position_ids=positions)
    found = [ours.train()(ids, position_ids=each).logits for each in (positions, positions.clone())]
    torch.testing.assert_close(*found)
    found[0].sum().backward()
