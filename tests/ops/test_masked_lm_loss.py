"""masked_lm_loss: the harness, and tests of this op only: selection of rows, samples, synchronization, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.kernels.common.index_errors import IndexErrors
from fasttfm.kernels.vocabulary import cross_entropy
from fasttfm.ops import masked_lm_loss
from fasttfm.testing.harness import same_bits
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.specs.masked_lm_loss import SPEC

TestMaskedLmLoss = op_tests(SPEC)

B, S, C, V = 3, 9, 16, 37
SEED = torch.tensor([2**40 + 11])
BACKENDS = ["cpu", "reference", pytest.param("triton", marks=interpreted)]


def drawn(device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < 0.6] = -100
    tensors = {
        "hidden": torch.randn(B, S, C, generator=generator),
        "weight": torch.randn(V, C, generator=generator),
        "bias": torch.randn(V, generator=generator),
    }
    return {**{name: value.to(device).requires_grad_() for name, value in tensors.items()}, "labels": labels.to(device)}


def predicted(labels: Tensor) -> tuple[Tensor, Tensor]:
    positions = (labels != -100).flatten().nonzero().squeeze(1)
    return positions, labels.flatten()[positions]


# ---- selection of rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ways_to_select_rows_agree(backend: str) -> None:
    """By positions, by labels, by labels with a limit: the same loss, gradients and samples, to the bit."""
    given = drawn()
    labels = given.pop("labels")
    positions, near = predicted(labels)
    call = dict(given, sample=True, counts=True, seed=SEED, backend=backend)
    results = [
        masked_lm_loss(**call, labels=near, positions=positions),
        masked_lm_loss(**call, labels=labels),
        masked_lm_loss(**call, labels=labels, max_predictions=len(positions)),
        masked_lm_loss(**call, labels=labels, max_predictions=len(positions) + 5),
    ]
    first = results[0]
    expected = torch.autograd.grad(first.loss, list(given.values()))
    for result in results[1:]:
        torch.testing.assert_close(result.loss, first.loss)
        assert (result.predictions, result.correct) == (first.predictions, first.correct)
        assert same_bits(result.samples.flatten()[positions], first.samples)
        assert (result.samples[labels == -100] == -100).all()
        found = torch.autograd.grad(result.loss, list(given.values()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_too_many_predictions() -> None:
    given = drawn()
    count = int((given["labels"] != -100).sum())
    with pytest.raises(ValueError, match=f"masked_lm_loss: max_predictions: expected at least the {count} labels"):
        masked_lm_loss(**given, max_predictions=count - 1)


@pytest.mark.gpu
def test_too_many_predictions_give_nan_on_a_gpu() -> None:
    given = drawn("cuda")
    count = int((given["labels"] != -100).sum())
    assert masked_lm_loss(**given, max_predictions=count - 1).isnan()
    assert masked_lm_loss(**given, max_predictions=count).isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_predicted_do_not_matter(backend: str) -> None:
    """NaN in a row that is not predicted has no effect, and the gradient of the row is zero."""
    given = drawn()
    ignored = given["labels"] == -100
    with torch.no_grad():
        given["hidden"][ignored] = torch.nan
    loss = masked_lm_loss(**given, backend=backend)
    assert loss.isfinite()
    dhidden, dweight = torch.autograd.grad(loss, [given["hidden"], given["weight"]])
    assert dhidden[ignored].count_nonzero() == 0
    assert dweight.isfinite().all()


@interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["everywhere", "the label", "another word"])
def test_rows_with_nan_are_not_correct(backend: str, place: str) -> None:
    labels = torch.tensor([3, 0, V - 1, 17])
    # The label has the largest logit of every row, apart from a NaN in the bias.
    hidden = torch.nn.functional.one_hot(torch.arange(len(labels)), C).float()
    weight = torch.zeros(V, C)
    weight[labels, torch.arange(len(labels))] = 9.0
    options = {"counts": True, "sample": True, "seed": SEED, "reduction": "none", "backend": backend}
    right = masked_lm_loss(hidden, weight, None, labels, **options)
    assert isinstance(right, ops.CountedLoss)
    assert right.correct == right.predictions == len(labels)
    bias = torch.zeros(V)
    if place == "everywhere":
        bias.fill_(torch.nan)
    else:
        bias[labels if place == "the label" else 5] = torch.nan
    found = masked_lm_loss(hidden, weight, bias, labels, **options)
    assert isinstance(found, ops.CountedLoss)
    assert found.loss.isnan().all()
    assert found.correct == 0
    assert found.samples is not None
    assert (found.samples == V - 1).all()


def test_meta_tensors_with_a_limit() -> None:
    given = {name: value.detach().to("meta") for name, value in drawn().items()}
    assert masked_lm_loss(**given, max_predictions=5).shape == ()


@interpreted
def test_a_kernel_records_a_wrong_position_and_continues() -> None:
    from fasttfm.kernels.vocabulary import triton_pick_rows

    errors = IndexErrors("masked_lm_loss", ("labels", "positions"))
    rows, out = torch.randn(5, C), torch.empty(3, C)
    triton_pick_rows.gather(rows, torch.tensor([4, 5, 0]), out, errors.words(rows.device))
    assert out.isnan().any(dim=1).tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"positions: expected indices in \[0, 5\), got 5 at token 1"):
        errors.raise_if_any()


# ---- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])  # Triton's interpreter is too slow; the samples are the same
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_samples_follow_the_softmax(backend: str, temperature: float) -> None:
    """Chi-square test of the samples for equal rows, with its 99.9% quantile (Wilson and Hilferty)."""
    count, words = 4000, 12
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(words, 8, generator=generator)
    hidden = torch.randn(1, 8, generator=generator).expand(count, 8)
    bias = 0.3 * torch.randn(words, generator=generator)
    labels = torch.zeros(count, dtype=torch.int64)
    call = {"sample": True, "temperature": temperature, "seed": SEED, "backend": backend}
    samples = masked_lm_loss(hidden, weight, bias, labels, positions=torch.arange(count), **call).samples
    expected = count * torch.softmax((hidden[0] @ weight.t() + bias) / temperature, dim=0)
    observed = torch.bincount(samples, minlength=words)
    enough = expected >= 5  # the others together as one
    pairs = [(observed[enough], expected[enough]), (observed[~enough].sum()[None], expected[~enough].sum()[None])]
    statistic = sum(((o - e) ** 2 / e.clamp(min=1)).sum() for o, e in pairs).item()
    freedom = int(enough.sum())
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic <= bound
    assert len(observed) == words


def test_uniform_numbers_are_uniform() -> None:
    """In the open interval, with the mean and variance of the uniform distribution, and different in every row."""
    u = cross_entropy.uniform(SEED, 100_000).double()
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) <= 4 * (1 / 12 / len(u)) ** 0.5
    assert abs(u.var() - 1 / 12) <= 4 * (1 / 180 / len(u)) ** 0.5
    assert len(u.unique()) > 0.98 * len(u)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_backend_samples_the_same_tokens(backend: str, temperature: float) -> None:
    given = drawn()
    call = dict(given, sample=True, temperature=temperature, seed=SEED)
    samples = masked_lm_loss(**call, backend=backend).samples
    assert same_bits(samples, masked_lm_loss(**call, backend="reference").samples)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_samples_of_a_large_vocabulary(backend: str, temperature: float) -> None:
    """More tokens than a tile of the Triton kernel."""
    generator = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(8, 4, generator=generator), torch.randn(4500, 4, generator=generator)
    call = {"sample": True, "temperature": temperature, "seed": SEED}
    labels = torch.zeros(8, dtype=torch.int64)
    samples = masked_lm_loss(hidden, weight, None, labels, **call, backend=backend).samples
    assert (samples > 4096).any()
    assert same_bits(samples, masked_lm_loss(hidden, weight, None, labels, **call, backend="reference").samples)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_and_padded_batches_sample_the_same_tokens(backend: str) -> None:
    given = drawn()
    lengths = [7, 2, 9]
    cu_seqlens = ops.cu_seqlens_from_lengths(lengths)
    real = torch.arange(S) < torch.tensor(lengths)[:, None]
    given["labels"] = given["labels"].masked_fill(~real, -100)
    packed = dict(given, hidden=ops.pack(given["hidden"], cu_seqlens), labels=ops.pack(given["labels"], cu_seqlens))
    call = {"sample": True, "seed": SEED, "backend": backend}
    padded_result, packed_result = masked_lm_loss(**given, **call), masked_lm_loss(**packed, **call)
    assert same_bits(ops.pack(padded_result.samples, cu_seqlens), packed_result.samples)
    torch.testing.assert_close(padded_result.loss, packed_result.loss)


def test_the_seed_determines_the_result() -> None:
    given = drawn()
    given["labels"] = torch.zeros(B, S, dtype=torch.int64)

    def words(seed: Tensor | None) -> Tensor:
        return masked_lm_loss(**given, sample=True, seed=seed).samples

    assert same_bits(words(SEED), words(SEED))
    assert not torch.equal(words(SEED), words(SEED + 1))
    torch.manual_seed(3)
    first, second = words(None), words(None)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert same_bits(first, words(None))


def test_samples_compile() -> None:
    given = drawn()
    step = torch.compile(masked_lm_loss, fullgraph=True, backend="aot_eager")
    found, expected = (
        function(**given, sample=True, counts=True, temperature=0.8, seed=SEED) for function in (step, masked_lm_loss)
    )
    assert same_bits(found.samples, expected.samples)
    assert found.loss.item() == expected.loss.item()
    assert (found.predictions, found.correct) == (expected.predictions, expected.correct)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("named", ["positions", "max_predictions"])
def test_nothing_synchronizes_with_the_gpu(named: str) -> None:
    given = drawn("cuda")
    positions, near = predicted(given["labels"])
    if named == "positions":
        given["labels"] = near
    call = {"positions": positions} if named == "positions" else {"max_predictions": 20}
    total = torch.tensor(12, device="cuda")

    def step() -> None:
        masked_lm_loss(**given, **call, counts=True, sample=True).loss.backward()
        masked_lm_loss(**given, **call, total=total).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory() -> None:
    """At most 200 MiB for 32,768 tokens of BERT-large, 15% of them predicted, including the gradients."""
    tokens, columns, words, count = 32768, 1024, 30522, 4915
    tensors = [
        torch.randn(shape, device="cuda").bfloat16() for shape in ((tokens, columns), (words, columns), (words,))
    ]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    positions = torch.randperm(tokens, device="cuda")[:count].sort().values
    labels = torch.randint(0, words, (count,), device="cuda")

    def step() -> object:
        return torch.autograd.grad(masked_lm_loss(*tensors, labels, positions=positions), tensors)

    def requested(what: str) -> int:
        """Bytes that tensors request. Blocks of the caching allocator may be larger, depending on earlier
        allocations."""
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    step()
    assert requested("peak") - before <= 200 * 2**20
