"""Batches that are padded to one shape: the fillers are in no loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_runs import settings_of

import fasttfm
from fasttfm import data
from fasttfm.models.families import objectives_of, trained_on_text
from fasttfm.train.cuda_graph import shapes
from fasttfm.train.fixed_shapes import FixedBatch, Shape, filled
from fasttfm.train.pretrain import make_model

OBJECTIVES = [
    (name, objective)
    for name, family in trained_on_text().items()
    for objective in objectives_of(family)
    if objective != "mlm" or name == "roberta"  # which has no other
]


@pytest.mark.parametrize(("name", "objective"), OBJECTIVES)
def test_fillers_change_no_sum(name: str, objective: str, corpus: dict[str, Path], tmp_path: Path) -> None:
    family = trained_on_text()[name]
    chosen = objectives_of(family)[objective]
    tokenizer = data.load_tokenizer(corpus[family.tokenizer])
    shards = data.prepare(corpus["data"], tokenizer, tmp_path / "shards", progress=False, workers=1)
    form = data.SequenceFormat(chosen.sequences, 40)  # type: ignore[arg-type]
    stream = data.BatchStream(shards, form, tokens_per_batch=150, seed=0)
    shape = Shape(300, 20, stream.max_predictions or 0, tokenizer.special.pad or 0)
    module = chosen.module(make_model(settings_of(corpus, name, objective=objective, dropout=0.0), tokenizer))
    module.double().eval()
    assert len(module.weights) == len(module.terms)
    found = set()
    for _, batch in zip(range(3), stream, strict=False):
        full = filled(batch, shape)
        assert isinstance(full, FixedBatch)
        assert (full.tokens, full.predictions) == (batch.tokens, batch.predictions)
        assert int(full.cu_seqlens.diff().max()) <= full.max_seqlen
        assert int(full.cu_seqlens[-1]) == len(full.input_ids) == 300
        assert module.counts(full) == module.counts(batch)
        assert module.flops(full) == module.flops(batch)
        found.add(shapes(full))
        sums = []
        for given in (batch, full):
            torch.manual_seed(0)  # ELECTRA samples tokens
            with fasttfm.use_backend("reference"):
                sums.append(torch.stack([*module(given)]))
        torch.testing.assert_close(sums[0], sums[1])
    assert len(found) == 1
    assert filled(batch, Shape(100, 20, 50, 0)) is batch  # larger than the shape
    assert filled(batch, Shape(300, batch.sequences, 50, 0)) is batch
