"""Torch's default device and default dtype do not change what ops, models and sessions compute for tensors of another
device and dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import small_bert
from torch import Tensor

from fasttfm import generate, models
from fasttfm.inference import Session
from fasttfm.testing.call import Call, backends_on
from fasttfm.testing.harness import same_bits
from fasttfm.testing.spec import OpSpec
from fasttfm.testing.specs import all_specs
from fasttfm.testing.specs.pack import UNPACK_SPEC

SPECS = [spec for spec in (*all_specs().values(), UNPACK_SPEC) if "cpu" in backends_on(spec, "cpu")]
IDS = [[1, 2, 3, 4, 5], [6, 7]]


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """Tensors that are made without a device have no memory, and those without a dtype are fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def check(compute: Callable[[], list[Tensor]]) -> None:
    expected = compute()
    with other_defaults():
        found = compute()
    assert len(found) == len(expected)
    assert all(same_bits(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_ops(spec: OpSpec) -> None:
    call = Call(spec, spec.cases[0], torch.float32, "cpu")
    inputs = call.inputs()
    incoming = call.incoming(inputs)
    check(lambda: list(call.tested(inputs, incoming=incoming).tensors().values()))


def test_training() -> None:
    model = small_bert("BertForMaskedLM").train()
    ids, mask = torch.tensor(IDS[0]).repeat(2, 1), torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        loss = model(ids, mask, labels=ids).loss + model(ids, lengths=[5, 3], labels=ids).loss
        loss.backward()
        return [loss, *(each.grad for each in model.parameters() if each.grad is not None)]

    check(step)


@pytest.mark.parametrize("options", [{}, {"precision": "int8"}], ids=["fp32", "int8"])
def test_sessions(options: dict[str, Any]) -> None:
    with Session(small_bert(), **options) as session:
        check(lambda: [torch.from_numpy(session.encode(IDS)), torch.from_numpy(session.encode(IDS, output="logits"))])


def test_generation() -> None:
    config = models.GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, n_positions=32, eos_token_id=None)
    model, ids = models.GPT2LMHeadModel(config).eval(), torch.tensor(IDS[:1])
    check(lambda: [generate.generate(model, ids, max_new_tokens=4)])
