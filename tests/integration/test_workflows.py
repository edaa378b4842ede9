"""Patched models in common workflows: compiled, exported, copied, checkpointed, distributed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import theirs_of
from patched_models import CAUSAL, IDS, LANGUAGE_MODELS, MASKS, B, S, batch, check_patched, pair
from ranks import run_ranks
from torch import Tensor

import fasttfm
from fasttfm import models
from fasttfm.testing import compare
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR

transformers = pytest.importorskip("transformers")
from fasttfm.patching import gpt2, parts  # noqa: E402
from fasttfm.patching.attention import attend  # noqa: E402

BERT = "BertForMaskedLM"


def step(module: Any, given: dict[str, Tensor], call: Any = None) -> list[Tensor]:
    """A loss with dropout, and every gradient."""
    torch.manual_seed(3)
    module.zero_grad()
    loss = (call or module)(**given).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in module.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mask"), [(BERT, "right"), (CAUSAL, "full")])
def test_a_training_step_is_one_graph(name: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    sizes = {"n_layer": 1} if name == CAUSAL else {"num_hidden_layers": 1}
    ours, theirs = (module.train() for module in pair(name, **sizes))
    fused: list[bool] = []  # one entry for each layer's attention, added when it is traced
    for module in (parts, gpt2):
        monkeypatch.setattr(module, "attend", lambda *args, **kwargs: fused.append(True) or attend(*args, **kwargs))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    given = batch(name, mask)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (compiled if module is ours else module)(**given).loss}

    check_patched(ours, theirs, call)
    assert fused


class Encoder(torch.nn.Module):
    """An encoder that returns a tensor, for export."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.encoder(ids, attention_mask=mask).last_hidden_state


def exported(module: torch.nn.Module, *inputs: Tensor) -> Any:
    """A program for any batch of 2 to 64 sequences of 2 to 20 tokens."""
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("sequence", min=2, max=20)}
    shapes = {name: sizes for name, _ in zip(("ids", "mask"), inputs, strict=False)}
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=shapes).module()


def test_a_patched_encoder_is_exported_for_any_batch() -> None:
    ours, theirs = (Encoder(module) for module in pair("BertModel"))
    program = exported(ours, IDS, MASKS["right"])
    for rows, columns in ((B, S), (5, 9)):
        ids, mask = IDS[:rows, :columns], MASKS["right"][:rows, :columns]
        kept = mask.bool()
        exact = copy.deepcopy(theirs).double()(ids, mask)[kept]
        with torch.no_grad():
            found = program(ids, mask)[kept]
        comparison = compare("states", found, theirs(ids, mask)[kept], exact, OUTPUT_FACTOR)
        assert comparison.ok, str(comparison)


def test_our_encoder_is_exported_for_any_batch() -> None:
    ours = Encoder(models.BertModel(models.BertConfig.named("tiny", vocab_size=61)).eval())
    program = exported(ours, IDS)
    with torch.no_grad():
        for ids in (IDS, IDS[:5, :9]):
            assert torch.equal(program(ids), ours(ids))


class PackedEncoder(Encoder):
    def forward(self, ids: Tensor, cu_seqlens: Tensor) -> Tensor:  # type: ignore[override]
        return self.encoder(ids, cu_seqlens=cu_seqlens, max_seqlen=S).last_hidden_state


def test_our_encoder_is_exported_for_any_packed_batch() -> None:
    ours = PackedEncoder(models.BertModel(models.BertConfig.named("tiny", vocab_size=61)).eval())
    batches = [
        (IDS.flatten()[: ends[-1]], torch.tensor([0, *ends], dtype=torch.int32))
        for ends in ((7, 20, 30), (9, 17), (1, 2, 3, 19, 35))
    ]
    shapes = {"ids": {0: torch.export.Dim("tokens", min=3)}, "cu_seqlens": {0: torch.export.Dim("boundaries", min=3)}}
    with torch.no_grad():
        program = torch.export.export(ours, batches[0], dynamic_shapes=shapes).module()
        for given in batches:
            assert torch.equal(program(*given), ours(*given))


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_copies_are_patched_and_train_equally_and_can_be_unpatched(name: str, duplicate: Any) -> None:
    ours, _ = pair(name, dropout=0.1)
    twin = duplicate(ours.train())
    assert [type(each) for each in twin.modules()] == [type(each) for each in ours.modules()]
    assert twin.get_output_embeddings().weight is twin.get_input_embeddings().weight
    given = batch(name)
    assert same(step(twin, given), step(ours, given))
    fasttfm.unpatch(twin)
    assert type(twin).__module__.startswith("transformers.")
    assert type(ours).__module__.startswith("fasttfm.")


def test_other_types_and_plain_bf16() -> None:
    ours, theirs = pair(BERT)
    given = batch(BERT)
    half = copy.deepcopy(ours).to(torch.bfloat16)
    assert half(**given).logits.dtype == torch.bfloat16
    loss, *gradients = step(half.train(), given)
    assert loss.isfinite()
    assert all(gradient.dtype == torch.bfloat16 and gradient.isfinite().all() for gradient in gradients)
    kept = MASKS["right"].bool()
    double = ours.double()(**given).logits[kept]
    torch.testing.assert_close(double, theirs.double()(**given).logits[kept], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [BERT, CAUSAL])
def test_autocast(name: str) -> None:
    """As accurate as transformers' model under autocast, by the tolerance rule."""
    ours, theirs = (module.train() for module in pair(name))
    given = batch(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, naive = ours(**given).loss, theirs(**given).loss
    assert found.dtype == torch.float32
    exact = copy.deepcopy(theirs).double()(**given).loss
    comparison = compare("loss", found.bfloat16(), naive.bfloat16(), exact, OUTPUT_FACTOR)
    assert comparison.ok, str(comparison)
    found.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())


def test_a_meta_model_is_patched_and_materialized() -> None:
    source = theirs_of(BERT)
    with torch.device("meta"):
        module = transformers.BertForMaskedLM(source.config)
    fasttfm.patch(module)
    module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict())
    module.tie_weights()
    buffers = dict(source.named_buffers())
    for name, buffer in module.named_buffers():  # those that no checkpoint has
        buffer.copy_(buffers[name])
    fasttfm.patch(source)
    given = batch(BERT)
    assert torch.equal(module.eval()(**given).logits, source.eval()(**given).logits)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [BERT, CAUSAL, "DistilBertForMaskedLM"])
def test_activation_checkpointing_changes_nothing_but_memory(name: str) -> None:
    ours, _ = pair(name, dropout=0.1)
    given = batch(name)
    ours.train().enable_input_require_grads()  # as checkpointing does: a hook, so embeddings are transformers' then
    expected, kept = step(ours, given), saved_bytes(lambda: ours(**given))
    ours.gradient_checkpointing_enable()
    assert same(step(ours, given), expected)
    assert saved_bytes(lambda: ours(**given)) < 0.75 * kept


def test_a_patched_model_saves_less_for_the_backward() -> None:
    ours, theirs = (module.train() for module in pair(BERT, dropout=0.1))
    for mask in ("full", "right"):
        given = batch(BERT, mask)
        assert saved_bytes(lambda: ours(**given)) < saved_bytes(lambda: theirs(**given))  # noqa: B023


# ---- two ranks -------------------------------------------------------------------------------------------------------


def half_of_a_batch(part: slice) -> dict[str, Tensor]:
    """Both halves have the same number of labels."""
    given = {name: value[part] for name, value in batch(BERT, "right").items()}
    labels = torch.full_like(given["labels"], -100)
    labels[:, 0] = given["input_ids"][:, 0]
    return given | {"labels": labels}


def distributed(rank: int, folder: str) -> None:
    """One of two ranks, with half the batch: DDP, then FSDP2."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    given = half_of_a_batch(slice(rank * B // 2, (rank + 1) * B // 2))
    replicated, sharded = (pair(BERT)[0].train() for _ in range(2))
    wrapper = torch.nn.parallel.DistributedDataParallel(replicated)  # alive until the backward has run
    wrapper(**given).loss.backward()
    for layer in sharded.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(sharded)(**given).loss.backward()
    whole = {name: parameter.grad.full_tensor() for name, parameter in sharded.named_parameters()}
    if rank == 0:
        copies = {name: parameter.grad for name, parameter in replicated.named_parameters()}
        torch.save({"ddp": copies, "fsdp2": whole}, f"{folder}/gradients.pt")
        with pytest.raises(ValueError, match="FSDP"):
            fasttfm.unpatch(sharded)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(distributed, str(tmp_path))
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    _, theirs = pair(BERT)
    whole = []
    for module in (theirs.train(), copy.deepcopy(theirs).double()):
        module.zero_grad()
        module(**half_of_a_batch(slice(None))).loss.backward()
        whole.append({name: parameter.grad for name, parameter in module.named_parameters()})
    naive, exact = whole
    for gradients in found.values():
        assert gradients.keys() == naive.keys()
        checked = [compare(name, gradients[name], naive[name], exact[name], GRADIENT_FACTOR) for name in naive]
        bound = max(each.bound for each in checked)
        assert all(each.error <= bound for each in checked), [str(each) for each in checked if not each.error <= bound]
