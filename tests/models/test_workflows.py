"""Models in common workflows: compiled, copied, exported, checkpointed, distributed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import GPT_SIZES, config_of
from ranks import run_ranks
from torch import Tensor

from fasttfm import models
from fasttfm.testing import compare
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.tolerance import GRADIENT_FACTOR

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 56,
    "max_position_embeddings": 21,
}
IDS = torch.randint(5, 61, (14,), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.tensor([1, 7, 9])
PACKED: dict[str, Any] = {
    "cu_seqlens": torch.tensor([0, 5, 14], dtype=torch.int32),
    "max_seqlen": 9,
    "labels": IDS[POSITIONS],
    "positions": POSITIONS,
}


# One of each family; ALBERT's layers share parameters, ELECTRA is generator and discriminator.
FAMILIES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {},
    "AlbertForMaskedLM": {"embedding_size": 20, "parameter_sharing": "attention", "hidden_dropout_prob": 0.1},
    "ElectraForJointPreTraining": {"embedding_size": 20, "generator_size": 1 / 3},
    "DistilBertForMaskedLM": {},
    "ModernBertForMaskedLM": {"local_attention": 4, "attention_dropout": 0.1, "pad_token_id": 0},
}
each_family = pytest.mark.parametrize("name", FAMILIES)


def model(name: str = "BertForMaskedLM", **changes: Any) -> Any:
    torch.manual_seed(0)
    return getattr(models, name)(config_of(models, name, {**SIZES, **FAMILIES[name], **changes}))


def check_tied(module: Any) -> None:
    tied = module.tied()
    assert tied
    assert all(module.get_parameter(name) is module.get_parameter(source) for name, source in tied.items())


def step(call: Any, module: torch.nn.Module) -> list[Tensor]:
    """The loss of a training step with dropout, and every gradient."""
    torch.manual_seed(3)
    module.zero_grad()
    loss = call(IDS, **PACKED).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in module.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@each_family
def test_a_training_step_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    module = model(name)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert same(step(compiled, module), step(module, module))


def test_an_encoder_is_exported() -> None:
    module = models.BertModel(models.BertConfig(**SIZES)).eval()
    ids = IDS.view(2, 7)
    with torch.no_grad():
        exported = torch.export.export(module, (ids,))
        assert torch.equal(exported.module()(ids).last_hidden_state, module(ids).last_hidden_state)


class _Packed(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        states: Tensor = self.encoder(ids, cu_seqlens=cu_seqlens, max_seqlen=16).last_hidden_state
        return states


ENCODERS = [
    *("BertModel", "RobertaModel", "AlbertModel", "ElectraModel", "DistilBertModel"),
    *("ModernBertModel", "EuroBertModel", "NomicBertModel", "MPNetModel"),
    *("DebertaV2Model", "XLNetModel", "T5EncoderModel"),
    *("OpenAIGPTModel", "GPT2Model", "GPT3Model"),
]


@pytest.mark.parametrize("name", ENCODERS)
def test_packed_encoders_are_exported_for_any_batch(name: str) -> None:
    torch.manual_seed(0)
    gpt = {**GPT_SIZES, "vocab_size": 61, "local_window": 3} if name == "GPT3Model" else {**GPT_SIZES, "vocab_size": 61}
    changes: dict[str, dict[str, Any]] = {
        "ModernBertModel": {"pad_token_id": 0, "local_attention": 4},
        "EuroBertModel": {"pad_token_id": 0},
        "DebertaV2Model": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    }
    small = {**SIZES, **changes.get(name, {})}
    module = _Packed(getattr(models, name)(config_of(models, name, gpt if "GPT" in name else small)).eval())
    batches = [(IDS, torch.tensor([0, 5, 9, 14], dtype=torch.int32)), (IDS[:12], torch.tensor([0, 3, 4, 9, 12]).int())]
    sizes: dict[str, Any] = {"ids": {0: torch.export.Dim("tokens", min=3)}}
    sizes["cu_seqlens"] = {0: torch.export.Dim("boundaries", min=4)}
    with torch.no_grad():
        program = torch.export.export(module, batches[0], dynamic_shapes=sizes).module()
        for given in batches:
            assert torch.equal(program(*given), module(*given))


@each_family
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_train_equally_and_stay_tied(name: str, duplicate: Any) -> None:
    module = model(name)
    twin = duplicate(module)
    check_tied(twin)
    assert not {id(parameter) for parameter in twin.parameters()} & {id(parameter) for parameter in module.parameters()}
    assert same(step(twin, twin), step(module, module))


@each_family
def test_other_types_and_back(name: str) -> None:
    """Values that fit 16 bits are exact; tied parameters stay tied in every type."""
    module = model(name).bfloat16()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    loss, *gradients = step(module.to(torch.float64), module)
    check_tied(module)
    assert all(gradient.dtype == torch.float64 and gradient.isfinite().all() for gradient in gradients)
    assert loss.isfinite()
    assert same([parameter.detach() for parameter in module.to(torch.bfloat16).parameters()], before)


@each_family
def test_built_on_the_meta_device_and_materialized(name: str) -> None:
    module = model(name)
    with torch.device("meta"):
        empty = model(name)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    empty.tie_weights()
    check_tied(empty)
    assert same(step(empty, empty), step(module, module))


@each_family
def test_activation_checkpointing_changes_nothing_but_memory(name: str) -> None:
    module = model(name)
    expected = step(module, module)
    kept = saved_bytes(lambda: module(IDS, **PACKED))
    module.gradient_checkpointing_enable()
    assert same(step(module, module), expected)
    assert saved_bytes(lambda: module(IDS, **PACKED)) < kept / 2
    module.gradient_checkpointing_disable()
    assert saved_bytes(lambda: module(IDS, **PACKED)) == kept


def plain(dtype: torch.dtype = torch.float32) -> models.BertForMaskedLM:
    module: models.BertForMaskedLM = model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).to(dtype)
    return module


def half_of_a_batch(part: slice) -> dict[str, Tensor]:
    ids = IDS.view(2, 7)
    return {"input_ids": ids[part], "labels": torch.where(torch.arange(7) < 2, ids, -100)[part]}


def check_gradients_of_the_whole(found: dict[str, Tensor]) -> None:
    """Against the gradients of a step with the whole batch."""
    whole = {}
    for dtype in (torch.float32, torch.float64):
        module = plain(dtype)
        module(**half_of_a_batch(slice(None))).loss.backward()
        whole[dtype] = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert found.keys() == whole[torch.float32].keys()
    for name, gradient in found.items():
        references = (whole[dtype][name] for dtype in whole)
        comparison = compare(name, gradient, *references, GRADIENT_FACTOR)
        assert comparison.ok, str(comparison)


def test_gradients_of_microbatches_add_up() -> None:
    module = plain()
    for part in (slice(0, 1), slice(1, 2)):
        (module(**half_of_a_batch(part)).loss / 2).backward()
    check_gradients_of_the_whole({name: parameter.grad for name, parameter in module.named_parameters()})


@each_family
def test_plain_bf16_trains(name: str) -> None:
    module = model(name).bfloat16()
    loss, *gradients = step(module, module)
    assert loss.isfinite()
    assert loss.dtype == torch.float32
    assert all(gradient.dtype == torch.bfloat16 and gradient.isfinite().all() for gradient in gradients)


def distributed(rank: int, folder: str) -> None:
    """One of two ranks, with half the batch: DDP, then FSDP2."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    batch = half_of_a_batch(slice(rank, rank + 1))
    replicated, sharded = plain(), plain()
    wrapper = torch.nn.parallel.DistributedDataParallel(replicated)  # alive until the backward has run
    wrapper(**batch).loss.backward()
    for layer in sharded.bert.encoder.layers:
        fully_shard(layer)
    fully_shard(sharded)(**batch).loss.backward()
    whole = {name: parameter.grad.full_tensor() for name, parameter in sharded.named_parameters()}
    if rank == 0:
        copies = {name: parameter.grad for name, parameter in replicated.named_parameters()}
        torch.save({"ddp": copies, "fsdp2": whole}, f"{folder}/gradients.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(distributed, str(tmp_path))
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    check_gradients_of_the_whole(found["ddp"])
    check_gradients_of_the_whole(found["fsdp2"])
