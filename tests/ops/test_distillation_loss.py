"""distillation_loss: the harness, and tests of this op only: blocks, a teacher that is the student, microbatches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm.ops import distillation_loss, vocabulary
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.specs.distillation_loss import SPEC

TestDistillationLoss = op_tests(SPEC)

N, C, D, V = 11, 16, 24, 37
BACKENDS = ["cpu", "reference", pytest.param("triton", marks=interpreted)]


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {
        "student_hidden": (N, C),
        "student_weight": (V, C),
        "student_bias": (V,),
        "teacher": (N, D),
        "teacher_weight": (V, D),
        "teacher_bias": (V,),
    }
    return {name: torch.randn(*shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def gradients(loss: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    return list(
        torch.autograd.grad(loss, [given[name] for name in ("student_hidden", "student_weight", "student_bias")])
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given_logits", [True, False])
@pytest.mark.parametrize("positions", [None, [3, 0, 10, 10, 4, 7, 1]])
def test_blocks_do_not_change_the_result(
    backend: str, given_logits: bool, positions: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in blocks of 2, against torch's own divergence."""
    given = drawn()
    rows = torch.arange(N) if positions is None else torch.tensor(positions)
    student = given["student_hidden"][rows] @ given["student_weight"].t() + given["student_bias"]
    logits = (given["teacher"] @ given["teacher_weight"].t() + given["teacher_bias"]).detach()
    targets = (logits[rows] / 2).log_softmax(dim=-1)
    divergence = torch.nn.functional.kl_div(
        (student / 2).log_softmax(dim=-1), targets, log_target=True, reduction="sum"
    )
    expected = 4 * divergence / len(rows)
    for name, value in {"_ROWS": 2, "_ROW_STEP": 2, "_BLOCKS": 100}.items():
        monkeypatch.setattr(vocabulary, name, value)
    call = dict(given, temperature=2.0, backend=backend, positions=None if positions is None else rows)
    if given_logits:
        call.update(teacher=logits, teacher_weight=None, teacher_bias=None)
    loss = distillation_loss(**call)
    torch.testing.assert_close(loss, expected)
    for found, wanted in zip(gradients(loss, given), gradients(expected, given), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_student_that_is_its_teacher(backend: str) -> None:
    """The same logits: no loss, no gradient, exactly."""
    given = drawn()
    same = {"student_bias": given["student_bias"], "teacher_bias": given["student_bias"]}
    pair = (given["student_hidden"], given["student_weight"])
    loss = distillation_loss(*pair, *pair, **same, temperature=3.0, backend=backend)
    assert loss.item() == 0
    assert all(found.count_nonzero() == 0 for found in gradients(loss, given))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whose", ["student_hidden", "teacher"])
def test_a_nan_affects_only_its_row_and_only_if_the_row_counts(backend: str, whose: str) -> None:
    given = {name: value.detach() for name, value in drawn().items()}
    given[whose][2:4] = torch.nan
    given["student_hidden"].requires_grad_()
    mask = torch.arange(N) != 3
    losses = distillation_loss(**given, mask=mask, reduction="none", backend=backend)
    (gradient,) = torch.autograd.grad(losses.nansum(), given["student_hidden"])
    assert losses.isnan().nonzero().tolist() == [[2]]
    assert not gradient[torch.arange(N) != 2].isnan().any()
    assert losses[3] == 0
    (gradient,) = torch.autograd.grad(
        distillation_loss(**given, mask=mask, reduction="sum", backend=backend), given["student_hidden"]
    )
    assert gradient.isnan().any(dim=1).nonzero().tolist() == [[2]]
    assert (gradient[3] == 0).all()


def test_the_teacher_gets_no_gradient() -> None:
    given = drawn()
    loss = distillation_loss(**given)
    assert torch.autograd.grad(loss, given["teacher"], allow_unused=True) == (None,)
    frozen = {name: value.detach() if "student" in name else value for name, value in given.items()}
    assert not distillation_loss(**frozen).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_microbatches_add_up(backend: str) -> None:
    given = drawn()
    mask = torch.arange(N) % 3 != 0
    whole = distillation_loss(**given, mask=mask, backend=backend)
    total = mask.sum()
    loss = torch.zeros(())
    for part in (slice(0, 4), slice(4, 5), slice(5, N)):
        rows = {name: given[name][part] for name in ("student_hidden", "teacher")}
        loss = loss + distillation_loss(**{**given, **rows}, mask=mask[part], total=total, backend=backend)
    torch.testing.assert_close(loss, whole)
    for found, wanted in zip(gradients(loss, given), gradients(whole, given), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
def test_nothing_synchronizes_with_the_gpu() -> None:
    given = {name: value.detach().cuda().requires_grad_() for name, value in drawn().items()}
    positions, mask = torch.tensor([1, 5, 5], device="cuda"), torch.tensor([1, 1, 0], device="cuda")

    def step() -> None:
        distillation_loss(**given, positions=positions, mask=mask, temperature=2.0).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
