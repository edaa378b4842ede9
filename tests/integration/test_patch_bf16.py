"""bf16 on CPUs without bf16 instructions: GEMMs are computed in fp32, in every path of patched models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fasttfm
from fasttfm.ops import linear

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "Roberta": {**SIZES, "type_vocab_size": 1},
    "Albert": {**SIZES, "embedding_size": 16},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1},
}
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear, torch.ops.aten.bmm}


class SlowProducts(TorchDispatchMode):
    """Records the rows of bf16 GEMMs that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS and args[-1].dtype == torch.bfloat16:
            self.rows.append(args[-2].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "bf16_products", lambda: "none")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_run_no_bf16_gemms(family: str, autocast: bool, without_instructions: None) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=99, **FAMILIES[family])
    model = getattr(transformers, f"{family}Model")(config).eval()
    ids = torch.randint(3, 99, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    if not autocast:
        model = model.bfloat16()
    fasttfm.patch(model)
    for hidden_states in (False, True):  # with a dispatch mode, layers run op by op
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), SlowProducts() as slow:
            output = model(ids, attention_mask=mask, output_hidden_states=hidden_states)
        # transformers' own modules around the layers: poolers, which read one row per sequence, and ALBERT's
        # projection.
        around = [ids.numel()] if family == "Albert" else []
        assert [rows for rows in slow.rows if rows != len(ids)] == around, slow.rows
        found = output.last_hidden_state[mask.bool()].float()
        assert functional.cosine_similarity(found, expected).min() > 0.999


def test_gradients_without_bf16_instructions(without_instructions: None) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 32), torch.randn(7, 32), torch.randn(7)
    given = [each.bfloat16().requires_grad_() for each in (x, weight, bias)]
    with SlowProducts() as slow:
        y = linear.dense(*given)
        y.sum().backward()
    assert slow.rows == []
    assert y.dtype == torch.bfloat16
    exact = [each.detach().double().requires_grad_() for each in given]
    wanted = functional.linear(*exact)
    wanted.sum().backward()
    # One rounding to bf16, after a sum in fp32 that is far more exact.
    assert torch.allclose(y.double(), wanted, rtol=2**-8, atol=1e-5)
    for ours, theirs in zip(given, exact, strict=True):
        assert torch.allclose(ours.grad.double(), theirs.grad, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "rows", "in_bf16"),
    [("none", 1, False), ("emulated", 15, True), ("emulated", 16, False), ("instructions", 64, True)],
)
def test_emulated_gemms_are_fp32_unless_rows_are_few(
    kind: str, rows: int, in_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are those of the activations, also in the GEMM of the weight's gradient."""
    monkeypatch.setattr(linear, "bf16_products", lambda: kind)
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(*shape).bfloat16() for shape in ((rows, 64), (96, 64), (rows, 96)))
    with SlowProducts() as slow:
        y, gradient = linear.matmul(x, weight.T), linear.matmul(dy.T, x)
        total = linear.add_matmul(torch.ones(rows, 96).bfloat16(), x, weight.T)
        dense = linear.dense(x.view(1, rows, 64), weight)
    assert bool(slow.rows) == in_bf16
    exact = x.double() @ weight.double().T
    for found, wanted in ((y, exact), (total, exact + 1), (dense[0], exact), (gradient, dy.double().T @ x.double())):
        assert found.dtype == torch.bfloat16
        # One rounding to bf16, after a sum in fp32 that is far more exact.
        assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=1e-4)
