"""linear_cross_entropy: the harness, and tests of this op only: blocks, shifted labels, microbatches, wrong labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.kernels.common.index_errors import IndexErrors
from fasttfm.kernels.linear_cross_entropy import reference
from fasttfm.ops import linear_cross_entropy, vocabulary
from fasttfm.testing.harness import same_bits
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.linear_cross_entropy import SPEC
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

TestLinearCrossEntropy = op_tests(SPEC)

N, C, V = 23, 16, 37
BACKENDS = ["cpu", "reference", pytest.param("triton", marks=interpreted)]


def drawn(*shape: int) -> dict[str, Tensor]:
    """hidden [*shape, C], weight, labels of which the second and every fifth are ignored, and bias."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, V, shape, generator=generator)
    labels.view(-1)[1::5] = -100
    return {
        "hidden": torch.randn(*shape, C, generator=generator).requires_grad_(),
        "weight": torch.randn(V, C, generator=generator).requires_grad_(),
        "labels": labels,
        "bias": torch.randn(V, generator=generator).requires_grad_(),
    }


def gradients(loss: Tensor, given: dict[str, Tensor], scale: float = 1.0) -> list[Tensor]:
    wanted = [given[name] for name in ("hidden", "weight", "bias")]
    return list(torch.autograd.grad(loss, wanted, torch.full_like(loss, scale)))


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_ROWS": 3, "_ROW_STEP": 4, "_BLOCKS": 100}.items():
        monkeypatch.setattr(vocabulary, name, value)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_blocks_do_not_change_the_result(backend: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """23 rows in blocks of 4: losses have the same bits, gradients are within the bounds of the tolerance rule."""
    given = drawn(N)
    call = dict(given, reduction=reduction, label_smoothing=0.1)
    whole = linear_cross_entropy(**call, backend=backend)
    small_blocks(monkeypatch)
    assert vocabulary.rows_of_block(N, 1) == 4
    parts = linear_cross_entropy(**call, backend=backend)
    wide = {
        name: value.double() if value.is_floating_point() else value for name, value in call.items() if name in given
    }
    exact = reference.linear_cross_entropy(**wide, reduction=reduction, label_smoothing=0.1)
    naive = reference.linear_cross_entropy(**call)
    assert compare("loss", parts, naive, exact, OUTPUT_FACTOR).ok
    assert compare("loss", whole, naive, exact, OUTPUT_FACTOR).ok
    found, plain = gradients(parts, given), gradients(naive, given)
    truth = torch.autograd.grad(exact, [wide[name] for name in ("hidden", "weight", "bias")], torch.ones_like(exact))
    for name, *tensors in zip(("dhidden", "dweight", "dbias"), found, plain, truth, strict=True):
        assert compare(name, *tensors, GRADIENT_FACTOR).ok


@pytest.mark.parametrize(
    ("count", "row_bytes", "rows"),
    [
        (0, 100, 0),
        (1, 100, 1),
        (1000, 61056, 1000),
        (4915, 61056, 1024),
        (19660, 61056, 2560),
        (32768, 100608, 4096),
        (10**6, 100608, 5248),
        (10**6, 10**9, 128),
    ],
)
def test_rows_of_a_block(count: int, row_bytes: int, rows: int) -> None:
    """At most 8 blocks of at least 960 rows, within 512 MiB."""
    assert vocabulary.rows_of_block(count, row_bytes) == rows


@pytest.mark.parametrize(
    ("wanted", "products"),
    [((), 1), (("hidden", "weight", "bias"), 3), (("weight",), 2), (("hidden",), 2), (("bias",), 1)],
)
def test_only_needed_gemms_are_computed(
    wanted: tuple[str, ...], products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = drawn(N)
    everything = gradients(linear_cross_entropy(**given), given)
    alone = {name: value.detach().requires_grad_(name in wanted) for name, value in given.items() if name != "labels"}
    multiply, calls = torch.mm, []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    loss = linear_cross_entropy(**alone, labels=given["labels"])
    assert len(calls) == products
    if wanted:
        found = torch.autograd.grad(loss, [alone[name] for name in wanted])
        names = ["hidden", "weight", "bias"]
        assert all(same_bits(one, everything[names.index(name)]) for name, one in zip(wanted, found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_backward(backend: str) -> None:
    """The fp32 sum of dweight is freed during a backward, unless retain_graph announces another one."""
    given = drawn(N)
    tensors = [given[name] for name in ("hidden", "weight", "bias")]
    loss = linear_cross_entropy(**given, backend=backend)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(same_bits(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)


@interpreted
@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_on_a_cpu_the_sum_of_dweight_is_the_gradient(retain_graph: bool, factor: float) -> None:
    """There is no second tensor of that size, unless a later backward needs the first."""
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    labels = torch.tensor([3, -100, 39, 0, 7])
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == weight.shape:
            saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = factor * ops.linear_cross_entropy(hidden, weight, labels, backend="cpu")
    gradients = torch.autograd.grad(loss, [hidden, weight], retain_graph=retain_graph)
    assert (gradients[1].data_ptr() in saved) == (not retain_graph)
    plain = factor * torch.nn.functional.cross_entropy(hidden @ weight.t(), labels)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, [hidden, weight]))
    if retain_graph:
        gradients[1].zero_()
        again = torch.autograd.grad(loss, [hidden, weight])
        torch.testing.assert_close(again[0], gradients[0])
        assert again[1].any()


@pytest.mark.parametrize("words", [1, 7, 8, 9, 63, 64, 65, 129])
def test_any_vocabulary_size_in_triton(words: int) -> None:
    """GEMMs end at a multiple of 8 tokens, rows are padded to one of 64, and kernels compute the tail."""
    hidden, weight = torch.randn(5, 24), torch.randn(words, 24)
    labels = torch.arange(5) % words
    tensors = [tensor.requires_grad_() for tensor in (hidden, weight)]
    loss = linear_cross_entropy(hidden, weight, labels, backend="triton")
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels)
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(one, tensors) for one in (loss, expected))
    torch.testing.assert_close(found, wanted)
    (alone,) = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, labels, backend="triton"), [weight])
    torch.testing.assert_close(alone, wanted[1])


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_shifted(backend: str) -> None:
    given = drawn(3, 7)
    loss = linear_cross_entropy(**given, shift=True, backend=backend)
    logits = given["hidden"] @ given["weight"].t() + given["bias"]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    for found, wanted in zip(gradients(loss, given), gradients(expected, given), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("lengths", [[7, 7, 7], [3, 0, 18], [0, 1, 0, 20], [21, 0]])
def test_shifted_in_a_packed_batch(lengths: list[int]) -> None:
    given = drawn(21)
    cu_seqlens = ops.cu_seqlens_from_lengths(lengths)
    loss = linear_cross_entropy(**given, shift=True, cu_seqlens=cu_seqlens, reduction="sum")
    logits = given["hidden"] @ given["weight"].t() + given["bias"]
    pieces = zip(logits.split(lengths), given["labels"].split(lengths), strict=True)
    sums = [torch.nn.functional.cross_entropy(x[:-1], y[1:], reduction="sum") for x, y in pieces if len(x) > 1]
    torch.testing.assert_close(loss, torch.stack(sums).sum())
    step = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    assert same_bits(step(**given, shift=True, cu_seqlens=cu_seqlens, reduction="sum").detach(), loss.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts(backend: str) -> None:
    given = drawn(N)
    given["weight"].data[:, :] = given["weight"].data.round()  # with whole numbers ties are exact
    given["hidden"].data = given["hidden"].data.round().clamp(-1, 1)
    given["bias"].data.zero_()
    logits = given["hidden"] @ given["weight"].t()
    best = logits.argmax(dim=-1)
    tied = logits == logits.amax(dim=-1, keepdim=True)
    assert (tied.sum(dim=-1) > 1).any()
    first = tied.int().argmax(dim=-1)
    labels = torch.where(torch.arange(N) % 2 == 0, first, given["labels"])
    labels[4], labels[6] = -100, (best[6] + 1) % V
    result = linear_cross_entropy(**{**given, "labels": labels}, counts=True, backend=backend)
    assert isinstance(result, ops.CountedLoss)
    assert result.predictions is not None
    assert result.correct is not None
    assert result.predictions.item() == (labels != -100).sum().item()
    assert result.correct.item() == (labels == first).sum().item()
    assert result.samples is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("at", "bad"), [((0, 0), -1), ((1, 2), V), ((0, 1), 2**40)])
def test_a_wrong_label_raises_on_the_cpu(backend: str, at: tuple[int, int], bad: int) -> None:
    given = drawn(2, 3)
    given["labels"][at] = bad
    shown = rf"linear_cross_entropy: labels: expected indices in \[0, {V}\) or -100, got {bad} at {at[0] * 3 + at[1]}"
    with pytest.raises(ValueError, match=shown):
        linear_cross_entropy(**given, backend=backend)


@interpreted
@pytest.mark.parametrize("bad", [-1, V, 2**40, -(2**40)])
def test_a_kernel_records_a_wrong_label_and_continues(bad: int) -> None:
    from fasttfm.kernels.linear_cross_entropy import triton as kernels
    from fasttfm.kernels.vocabulary.cross_entropy import Loss

    errors = IndexErrors("linear_cross_entropy", ("labels", "positions"))
    logits = torch.randn(3, 64)
    labels = torch.tensor([0, 2, 4, bad, 7])
    losses = torch.zeros(5)
    outputs = (losses, torch.zeros(5, dtype=torch.bool), torch.empty(0, dtype=torch.int64))
    words = errors.words(logits.device)
    kernels.linear_cross_entropy_triton(
        logits, V, None, labels, None, None, outputs, 2, Loss(count_correct=True), True, words
    )
    assert losses.isnan().tolist() == [False, False, False, True, False]
    assert not outputs[1][3]
    assert logits[1].count_nonzero() == 0
    assert logits.isfinite().all()
    limit = 2**31
    shown = str(bad) if abs(bad) < limit else f"{max(-limit, min(limit - 1, bad))} or beyond"
    with pytest.raises(ValueError, match=rf"labels: expected indices in \[0, {V}\), got {shown} at token 3"):
        errors.raise_if_any()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_wrong_label_leaves_the_gpu_usable(backend: str) -> None:
    given = {name: value.detach().cuda().requires_grad_(name != "labels") for name, value in drawn(N).items()}
    good = given["labels"].clone()
    given["labels"][3] = V
    loss = linear_cross_entropy(**given, backend=backend)
    loss.backward()
    assert loss.isnan()
    assert given["hidden"].grad is not None
    if backend == "triton":
        with pytest.raises(ValueError, match=rf"got {V} at token 3"):
            ops.check_errors()
    assert linear_cross_entropy(**{**given, "labels": good}, backend=backend).isfinite()
    ops.check_errors()


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_microbatches_add_up(backend: str, as_tensor: bool) -> None:
    """With the total count, the losses and gradients of the parts add up to those of the whole batch."""
    given = drawn(N)
    count = (given["labels"] != -100).sum()
    whole = linear_cross_entropy(**given, backend=backend)
    total = count if as_tensor else int(count)
    parts = [
        linear_cross_entropy(
            given["hidden"][part], given["weight"], given["labels"][part], given["bias"], total=total, backend=backend
        )
        for part in (slice(0, 9), slice(9, 10), slice(10, N))
    ]
    loss = torch.stack(parts).sum()
    torch.testing.assert_close(loss, whole)
    for found, expected in zip(gradients(loss, given), gradients(whole, given), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loss_scale_is_exact(backend: str, dtype: torch.dtype) -> None:
    """A scaled loss has scaled gradients, with the same bits if the scale is a power of two; in fp16, gradients that
    would underflow without it are kept."""
    if backend == "triton" and dtype == torch.float16:
        pytest.skip("Triton's interpreter rounds 16-bit types otherwise")
    given = {name: value.detach() for name, value in drawn(N).items()}
    given = {
        name: value.to(dtype).requires_grad_() if value.is_floating_point() else value for name, value in given.items()
    }
    loss = linear_cross_entropy(**given, backend=backend)
    plain = torch.autograd.grad(loss, [given["hidden"], given["weight"]], retain_graph=True)
    scaled = torch.autograd.grad(loss, [given["hidden"], given["weight"]], torch.tensor(1024.0))
    for one, other in zip(plain, scaled, strict=True):
        normal = one.abs() >= torch.finfo(dtype).tiny
        assert torch.equal(one[normal] * 1024, other[normal])
        assert (other != 0).sum() >= (one != 0).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tied_weights(backend: str) -> None:
    """One tensor is both embedding and decoder: its gradient is the sum over both uses."""
    given = drawn(N)
    ids = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(5))

    def gradient(table: Tensor, decoder: Tensor) -> list[Tensor]:
        hidden = torch.tanh(ops.embedding(ids, table))
        loss = linear_cross_entropy(hidden, decoder, given["labels"], backend=backend)
        return list(torch.autograd.grad(loss, {table, decoder}))

    (tied,) = gradient(given["weight"], given["weight"])
    copy = given["weight"].detach().clone().requires_grad_()
    torch.testing.assert_close(tied, sum(gradient(given["weight"], copy)))


def test_backward_twice() -> None:
    given = drawn(N)
    loss = linear_cross_entropy(**given)
    first = torch.autograd.grad(loss, [given["hidden"], given["weight"]], retain_graph=True)
    second = torch.autograd.grad(loss, [given["hidden"], given["weight"]])
    assert all(same_bits(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved(dtype: torch.dtype) -> None:
    """Gradients, no logits: dh in hidden's type, dweight and dbias in fp32; labels."""
    given = {name: value.detach() for name, value in drawn(N).items()}
    given = {
        name: value.to(dtype).requires_grad_() if value.is_floating_point() else value for name, value in given.items()
    }
    expected = N * C * dtype.itemsize + 4 * (V * C + V) + given["labels"].nbytes
    assert saved_bytes(lambda: linear_cross_entropy(**given)) == expected


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits() -> None:
    """Row offsets of a block and of a call are 64-bit: the last of 66,000 rows are correct."""
    rows, words = 66_000, 50_257
    hidden = torch.randn(rows, 16, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(words, 16, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, words, (rows,), device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_BYTES", 2**34)
        patch.setattr(vocabulary, "_BLOCKS", 1)
        losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
    tail = slice(rows - 5, rows)
    exact = reference.linear_cross_entropy(hidden[tail].double(), weight.double(), labels[tail], reduction="none")
    naive = reference.linear_cross_entropy(hidden[tail], weight, labels[tail], reduction="none")
    assert compare("losses", losses[tail], naive, exact, OUTPUT_FACTOR).ok


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_loss_scale_comes_before_rounding_to_fp16(device: str) -> None:
    """As in torch's cross entropy of fp32 logits, from which the error is taken."""
    generator, rows, scale = torch.Generator().manual_seed(0), 65_536, 65_536.0
    hidden = torch.randn(rows, 16, generator=generator).half().to(device)
    weight = (0.02 * torch.randn(32, 16, generator=generator)).half().to(device)
    labels = torch.randint(0, 32, (rows,), generator=generator).to(device)

    def gradient(dtype: torch.dtype, tested: bool) -> Tensor:
        x, w = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        loss: Any = ops.linear_cross_entropy(x, w, labels) if tested else None
        loss = torch.nn.functional.cross_entropy((x @ w.t()).to(wide), labels) if loss is None else loss
        (loss * scale).backward()
        assert x.grad is not None
        return x.grad.double()

    exact = gradient(torch.float64, False)
    torchs, found = ((gradient(torch.float16, tested) - exact).norm() for tested in (False, True))
    assert found <= 2 * torchs
