"""A first forward under ``torch.inference_mode()``, then training in the same process.

Tensors that are created inside of inference mode cannot be changed in place outside of it, nor saved for a backward.
What the package keeps from call to call must therefore be created outside.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_parity import config_of
from small_models import small_bert
from torch import Tensor

import fasttfm
from fasttfm import models
from fasttfm.inference import Session
from fasttfm.kernels.common import index_errors
from fasttfm.kernels.common.index_errors import IndexErrors
from fasttfm.ops.core import weight_copies
from fasttfm.testing.pytest_ops import interpreted


@pytest.fixture(autouse=True)
def first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the error words of the ops, as in a process without an earlier call."""
    for errors in index_errors._all:
        monkeypatch.setattr(errors, "_devices", {})


def test_error_words_can_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_errors, "_all", [])
    errors = IndexErrors("op", ("ids",))
    with torch.inference_mode():
        words = errors.words(torch.device("cpu"))
    assert not words.is_inference()
    words[:, 0] = torch.tensor([7 << 32 | 50, 10])
    with pytest.raises(ValueError, match=r"op: ids: expected indices in \[0, 10\), got 50 at token 7"):
        errors.raise_if_any()
    errors.raise_if_any()


def test_error_words_are_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copy is on the host, whatever torch's default device is."""
    monkeypatch.setattr(index_errors, "_all", [])
    with torch.device("meta"):
        IndexErrors("op", ("ids",)).words(torch.device("cpu"))
        state = index_errors._DeviceState(torch.device("cpu"), 1)
    assert state.host.is_cpu


def test_copies_of_parameters_can_be_written_and_trained_with() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    (entry,) = weight_copies.enroll([parameter])
    assert weight_copies.copies_of([parameter], torch.bfloat16)[0] is None
    entry.to_write(parameter)
    with torch.inference_mode():  # an evaluation in another type
        assert weight_copies.copies_of([parameter], torch.float16)[0] is None
        weight_copies.refresh([entry], everything=True)
        copy = weight_copies.copies_of([parameter], torch.float16)[0]
    assert copy is not None
    assert not copy.is_inference()
    step = weight_copies.StepCopies([parameter], enrolled=True)
    step.find(captured=False, moved=True)
    step.written()


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}


@interpreted
def test_ops_train_after_an_evaluation() -> None:
    """The Triton kernels that report bad indices, in Triton's interpreter."""
    table = torch.nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))
    ids = torch.tensor([1, 5])

    def loss() -> Tensor:
        hidden = fasttfm.ops.embedding(ids, table, backend="triton")
        assert isinstance(hidden, Tensor)
        return fasttfm.ops.linear_cross_entropy(hidden, table, ids, backend="triton")

    with torch.inference_mode():
        loss()
    loss().backward()
    fasttfm.ops.check_errors()
    assert table.grad is not None


def test_a_session_takes_weights_outside() -> None:
    model = small_bert()
    with torch.inference_mode():
        session = Session(model, dtype=torch.float64)  # copies, because the model has another dtype
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    assert session.take_weights(model)
    assert np.array_equal(session.encode([[1, 2]]), Session(model, dtype=torch.float64).encode([[1, 2]]))


@pytest.mark.gpu
@pytest.mark.parametrize("patched", [False, True], ids=["ours", "patched"])
def test_a_model_trains_after_an_evaluation(patched: bool) -> None:
    torch.manual_seed(0)
    if patched:
        transformers = pytest.importorskip("transformers")
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).cuda()
        fasttfm.patch(model)
    else:
        model = models.BertForMaskedLM(config_of(models, "BertForMaskedLM", SIZES)).cuda()
    ids = torch.randint(5, 64, (2, 8), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.inference_mode():
        model.eval()(input_ids=ids, labels=ids)
    model.train()
    optimizer = fasttfm.optim.AdamW(model.parameters(), lr=1e-3, weight_copies=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    fasttfm.ops.check_errors()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
