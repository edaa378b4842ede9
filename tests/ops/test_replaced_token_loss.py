"""replaced_token_loss: the harness, and tests of this op only: arbitrary values in the padding; microbatches."""

import pytest
import torch

from fasttfm import ops
from fasttfm.ops import replaced_token_loss
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.replaced_token_loss import SPEC

TestReplacedTokenLoss = op_tests(SPEC)

LENGTHS = [5, 0, 9]


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(3, 9, generator=generator)
    real = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    return logits.masked_fill(~real, torch.nan), torch.rand(3, 9, generator=generator) < 0.2, real


def test_all_ways_to_exclude_padding_agree() -> None:
    """A mask, lengths, a packed batch, and tokens selected by the caller; NaN in the padding has no effect."""
    logits, labels, real = batch()
    logits.requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[real], labels[real].float())
    (expected,) = torch.autograd.grad(loss, logits)
    cu_seqlens = ops.cu_seqlens_from_lengths(LENGTHS)
    found = [
        replaced_token_loss(logits, labels, mask=real),
        replaced_token_loss(logits, labels.long(), lengths=torch.tensor(LENGTHS)),
        replaced_token_loss(ops.pack(logits, cu_seqlens), ops.pack(labels, cu_seqlens)),
    ]
    for one in found:
        torch.testing.assert_close(one, loss)
        torch.testing.assert_close(torch.autograd.grad(one, logits)[0], expected)


@pytest.mark.parametrize("wrong", [2, -1, -100])
def test_invalid_labels(wrong: int) -> None:
    logits, labels, real = batch()
    labels = labels.long().masked_fill(~real, wrong)
    assert replaced_token_loss(logits, labels, mask=real).isfinite()
    labels[0, 3] = wrong
    with pytest.raises(ValueError, match=rf"^replaced_token_loss: labels: expected .*, got {wrong} at \[0, 3\]"):
        replaced_token_loss(logits, labels, mask=real)


@pytest.mark.gpu
def test_invalid_labels_give_nan_on_a_gpu() -> None:
    logits, labels, real = (tensor.cuda() for tensor in batch())
    labels = labels.long()
    labels[0, 3] = 2
    logits.requires_grad_()
    losses = replaced_token_loss(logits, labels, mask=real, reduction="none")
    assert losses.isnan().nonzero().tolist() == [[0, 3]]
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient[0, 3] == 0


@pytest.mark.parametrize("as_tensor", [True, False])
def test_microbatches_add_up(as_tensor: bool) -> None:
    logits, labels, real = batch()
    total = real.sum() if as_tensor else int(real.sum())
    parts = [replaced_token_loss(logits[i], labels[i], mask=real[i], total=total) for i in range(3)]
    torch.testing.assert_close(torch.stack(parts).sum(), replaced_token_loss(logits, labels, mask=real))
