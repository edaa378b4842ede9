"""Torch's default device and default dtype do not change what ops, models and sessions compute for tensors of another
device and dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import small_bert
from torch import Tensor, nn

from fasttfm import generate, models, ops, optim
from fasttfm.inference import Session
from fasttfm.nn import Fp8Training, PackedLayer, PackedTransformer
from fasttfm.tasks.finetuning import FinetuneSettings, shuffled_steps
from fasttfm.testing.call import Call, backends_on
from fasttfm.testing.harness import same_bits
from fasttfm.testing.spec import OpSpec
from fasttfm.testing.specs import all_specs
from fasttfm.testing.specs.pack import UNPACK_SPEC
from fasttfm.train.optimizers import Lamb

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_default_dtypes_change_no_training(dtype: torch.dtype) -> None:
    """Step counts, divisors of losses and FP8's scales have types of their own."""
    hidden, weight = torch.randn(9, 16), torch.randn(50, 16)
    labels, first = torch.randint(0, 50, (9,)), torch.randn(7, 5)

    def compute() -> list[Tensor]:
        parameter = nn.Parameter(first.clone())
        optimizer = Lamb([parameter], lr=0.1)
        for _ in range(300):  # bf16 counts to 256
            parameter.grad = first.clone()
            optimizer.step()
        losses = [ops.linear_cross_entropy(hidden, weight, labels, total=total) for total in (1001.0, 100_000.0)]
        return [parameter.detach(), optimizer.state[parameter]["step"], *losses]

    def fp8() -> list[Tensor]:
        torch.manual_seed(0)
        layer = PackedLayer(32, 2, 64, dropout=0.0, attention_dropout=0.0, dtype=torch.float32)
        scaling = Fp8Training(stack := PackedTransformer([layer]))
        stack(torch.ones(9, 32, dtype=torch.float32), torch.tensor([0, 9], dtype=torch.int32), 9).sum().backward()
        scaling.update()
        return [scaling.scales.scale]

    expected, expected_fp8 = compute(), [each.dtype for each in fp8()]
    torch.set_default_dtype(dtype)
    try:
        found, found_fp8 = compute(), [each.dtype for each in fp8()]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(same_bits(*each) for each in zip(found, expected, strict=True))
    assert found_fp8 == expected_fp8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_norm_of_adamw_is_fp32(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.randn(64, 1 << 16, device="cuda"))
    parameter.grad = torch.randn_like(parameter)
    optimizer = optim.AdamW([parameter], max_norm=1.0)
    torch.set_default_dtype(dtype)
    try:
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.last_norm is not None
    assert optimizer.last_norm.dtype == torch.float32
    torch.testing.assert_close(optimizer.last_norm, parameter.grad.norm(), rtol=1e-5, atol=0)


def test_steps_are_shuffled_on_the_host() -> None:
    settings = FinetuneSettings()
    expected = list(shuffled_steps([1, 2, 3], settings, 0))  # type: ignore[list-item]
    with other_defaults():
        assert list(shuffled_steps([1, 2, 3], settings, 0)) == expected  # type: ignore[list-item]
