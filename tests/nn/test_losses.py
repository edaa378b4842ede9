"""Losses of a few logits: labels that are ignored, and those that are refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fasttfm.nn.losses import classification_loss, token_loss

LOGITS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("problem_type", [None, "single_label_classification"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ignored_labels_do_not_count(problem_type: str | None, dtype: torch.dtype) -> None:
    labels = torch.tensor([2, -100, 0, -100], dtype=dtype)
    expected = functional.cross_entropy(LOGITS[::2], torch.tensor([2, 0]))
    torch.testing.assert_close(classification_loss(LOGITS, labels, problem_type), expected)
    logits = LOGITS.clone().requires_grad_()
    loss = classification_loss(logits, torch.full_like(labels, -100), problem_type)
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_classes_that_are_not_integers_are_refused() -> None:
    for labels in (torch.tensor([0.0, 1.7, 2.0, 0.0]), torch.zeros(4, dtype=torch.bfloat16)):
        with pytest.raises(TypeError, match="labels: expected the numbers of classes as integers"):
            classification_loss(LOGITS, labels, "single_label_classification")
        with pytest.raises(TypeError, match="labels: expected the numbers of classes as integers"):
            token_loss(LOGITS, labels)
