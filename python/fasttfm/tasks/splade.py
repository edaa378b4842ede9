"""``SpladeTask``: sparse vectors of texts over a vocabulary, trained as the similarity task trains dense ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from fasttfm import ops
from fasttfm._atomic_files import write_text
from fasttfm.data.lines import DataError
from fasttfm.inference.opening import base_of
from fasttfm.inference.sparse import word_blocks
from fasttfm.models.family import Head
from fasttfm.models.text_model import LAST_STATES
from fasttfm.tasks.inputs import TaskBatch
from fasttfm.tasks.similarity import SimilarityTask
from fasttfm.tasks.task import Language


class SpladeTask(SimilarityTask):
    """Trains SPLADE's vectors, compared by dot products: log(1 + relu(logit)) of each word, the largest of all tokens.

    To the loss it adds the FLOPS regulariser (Paria et al., 2020) of first texts and of the others: the sum over words
    of the squared mean weight, an estimate of the multiplications of a search.

    Args:
        flops_weight: The weights of the regulariser, for first texts (queries) and for the others (documents).
    """

    head = Head.MASKED_LM

    def __init__(
        self,
        language: Language,
        train: Sequence[Any] | None,
        *,
        temperature: float | None = None,
        dimensions: Sequence[int] = (),
        flops_weight: Sequence[float] = (5e-5, 3e-5),
        **options: Any,
    ) -> None:
        super().__init__(language, train, temperature=1.0 if temperature is None else temperature, **options)
        if dimensions:
            raise ValueError(f"dimensions: expected with mean vectors, got {tuple(dimensions)} with splade")
        if len(flops_weight) != 2 or min(flops_weight) < 0:
            raise ValueError(f"flops_weight: expected two numbers from 0 on, got {tuple(flops_weight)}")
        if self.scored:
            raise DataError("similarity: expected pairs or triplets to train splade, got pairs with scores")
        self.flops_weight = tuple(flops_weight)

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        """The weights of words of all texts of a batch: fp32 [texts, V]."""
        if self.processes > 1:
            raise ValueError(f"vectors: expected one process with splade, got {self.processes}")
        inputs = {**batch.inputs(), **LAST_STATES}
        rows = model.lm_head.transform(base_of(model).encode(**inputs).x)
        decoder = model.lm_head.decoder
        largest = LargestLogits.apply(rows, decoder.weight, decoder.bias, batch.cu_seqlens, batch.max_seqlen)
        assert isinstance(largest, Tensor)
        return largest.log1p()

    def _loss(self, vectors: Tensor, batch: TaskBatch) -> Tensor:
        first, second, negative, _ = self._rows(batch.features, vectors.device)
        queries, documents = vectors[first], vectors[torch.cat([second, negative])]
        penalty = self.flops_weight[0] * flops(queries) + self.flops_weight[1] * flops(documents)
        return super()._loss(vectors, batch) + penalty

    def save(self, directory: Path, config: Any) -> None:
        """Writes the settings of the vectors, as sentence-transformers and ``fasttfm embed`` read them."""
        kinds = (("", "models.MLMTransformer"), ("1_SpladePooling", "models.SpladePooling"))
        modules = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.sparse_encoder.{kind}"}
            for n, (path, kind) in enumerate(kinds)
        ]
        pooling = {"pooling_strategy": "max", "activation_function": "relu"}
        length = {"max_seq_length": self.language.format.max_length, "do_lower_case": False}
        for name, content in (
            ("modules.json", modules),
            ("1_SpladePooling/config.json", pooling),
            ("sentence_bert_config.json", length),
            ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}),
        ):
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(content, indent=2) + "\n")


def flops(weights: Tensor) -> Tensor:
    """The FLOPS regulariser of weights [texts, V]."""
    return weights.mean(0).square().sum()


class LargestLogits(torch.autograd.Function):
    """``inference.sparse.largest_logits`` with gradients, of transformed states. The logits of all tokens are never in
    memory, nor are their gradients: both passes compute those of a block of words."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, longest: int
    ) -> Tensor:
        texts, words = len(cu_seqlens) - 1, len(weight)
        largest = torch.empty(texts, words, dtype=torch.float32, device=rows.device)
        places = torch.empty(texts, words, dtype=torch.int32, device=rows.device)
        for block in word_blocks(words, texts * longest):
            logits = linear(rows, weight[block], None if bias is None else bias[block])
            values, indices = ops.unpack(logits, cu_seqlens, longest).max(1)  # padding is 0
            largest[:, block], places[:, block] = values, indices.to(torch.int32)
        largest.relu_()
        ctx.save_for_backward(rows, weight, bias, cu_seqlens, largest, places)
        ctx.longest = longest
        return largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, cu_seqlens, largest, places = ctx.saved_tensors
        gradient = gradient.float() * (largest > 0)
        tokens = (places + cu_seqlens[:-1, None]).long().clamp(max=len(rows) - 1)
        states = rows.float()
        drows, dweight = torch.zeros_like(states), torch.empty_like(weight, dtype=torch.float32)
        for block in word_blocks(len(weight), (len(cu_seqlens) - 1) * ctx.longest):
            dlogits = states.new_zeros(len(rows), len(weight[block]))
            dlogits.scatter_add_(0, tokens[:, block], gradient[:, block])
            drows.addmm_(dlogits, weight[block].float())
            torch.mm(dlogits.t(), states, out=dweight[block])
        dbias = None if bias is None else gradient.sum(0).to(bias.dtype)
        return drows.to(rows.dtype), dweight.to(weight.dtype), dbias, None, None
