"""Training SPLADE's vectors: the maximum with gradients, the loss, and the saved folder."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from fasttfm.cli.main import main
from fasttfm.data.lines import DataError
from fasttfm.data.pair_files import SimilarityExample
from fasttfm.inference import Session, sparse
from fasttfm.tasks.finetuning import prepare
from fasttfm.tasks.splade import LargestLogits

EXAMPLES = [
    SimilarityExample("the whale swam in the sea", "a whale is in the water", ("the senate met",)),
    SimilarityExample("the congress voted", "the senate met and voted"),
]


@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_are_those_of_the_whole_logits(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_BLOCK_BYTES", 1)  # 64 words at a time
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float32) for n in (12, 150))
    bias = torch.randn(150, generator=generator, dtype=torch.float32) - 3 if has_bias else None
    inputs = [tensor.requires_grad_() for tensor in (rows, weight, bias) if tensor is not None]
    ends = [0, 5, 5, 11, 12]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    largest = LargestLogits.apply(rows, weight, bias, cu_seqlens, 6)
    logits = torch.nn.functional.linear(rows, weight, bias)
    parts = [logits[first:last] for first, last in itertools.pairwise(ends)]
    expected = torch.stack([part.amax(0).relu() if len(part) else torch.zeros(150) for part in parts])
    torch.testing.assert_close(largest, expected)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float32)
    for one, other in zip(
        torch.autograd.grad(largest, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_the_loss_is_its_formula(bert_directory: Path) -> None:
    model, task = prepare("similarity", bert_directory, EXAMPLES, vectors="splade", flops_weight=(0.5, 0.25))
    batch = task.batch(task.features(EXAMPLES))
    with torch.no_grad():
        logits = model(**batch.inputs()).logits
    ends = batch.cu_seqlens.tolist()
    weights = torch.stack([logits[a:b].amax(0).relu().log1p() for a, b in itertools.pairwise(ends)])
    torch.testing.assert_close(task.logits(model, batch).detach(), weights, atol=1e-5, rtol=1e-5)
    queries, documents = weights[[0, 3]], weights[[1, 4, 2]]
    expected = torch.nn.functional.cross_entropy(queries @ documents.T, torch.arange(2))
    expected += 0.5 * queries.mean(0).square().sum() + 0.25 * documents.mean(0).square().sum()
    torch.testing.assert_close(task.loss(model, batch).detach(), expected, atol=1e-5, rtol=1e-5)


def test_what_is_refused(bert_directory: Path) -> None:
    for options, sentence in (
        ({"vectors": "max"}, "vectors: expected mean, splade, tokens, got 'max'"),
        ({"flops_weight": (1, 1)}, "flops_weight: expected with splade vectors, got mean"),
        ({"vectors": "splade", "flops_weight": (1, -1)}, "flops_weight: expected two numbers from 0 on, got"),
        ({"vectors": "splade", "dimensions": (8,)}, "dimensions: expected with mean vectors, got"),
    ):
        with pytest.raises(ValueError, match=sentence):
            prepare("similarity", bert_directory, EXAMPLES, **options)  # type: ignore[arg-type]
    scored = [SimilarityExample("a", "b", (), 1.0)]
    with pytest.raises(DataError, match="expected pairs or triplets to train splade, got pairs with scores"):
        prepare("similarity", bert_directory, scored, vectors="splade")


@pytest.mark.filterwarnings("ignore:.*truncated")
def test_the_command_saves_a_sparse_model(bert_directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    arguments = ["finetune", "--task", "similarity", "--vectors", "splade", "--model", str(bert_directory)]
    arguments += ["--output", str(output), "--epochs", "1", "--learning-rate", "1e-3", "--max-length", "32"]
    assert main([*arguments, "--batch-size", "64", "--quiet", "--device", "cpu"]) == 0
    texts = ["the whale swam", "the debts of the nation"]
    with Session(output, device="cpu") as session:
        assert session.settings.pooling == ("splade",)
        sparse = session.encode(texts, output="sparse")
    library = pytest.importorskip("sentence_transformers", reason="it opens the folder")
    theirs = library.SparseEncoder(str(output), device="cpu")
    expected = theirs.encode(texts, convert_to_sparse_tensor=False).numpy()
    np.testing.assert_allclose(sparse.dense(), expected, atol=1e-4)
