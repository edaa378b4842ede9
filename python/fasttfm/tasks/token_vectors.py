"""``TokenVectorsTask``: vectors of tokens (ColBERT), trained as the similarity task trains vectors of texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, normalize, pad, softmax

from fasttfm import ops
from fasttfm._atomic_files import write_text
from fasttfm.data.lines import DataError
from fasttfm.nn.packed_batch import on_device
from fasttfm.tasks.inputs import Feature, TaskBatch
from fasttfm.tasks.metrics import Scores
from fasttfm.tasks.similarity import SimilarityTask, pair_ranks, scores_of_ranks
from fasttfm.tasks.task import Language, Predictions


class TokenPair(NamedTuple):
    """The normalized vectors of the tokens of an example's two texts: fp32 [tokens, D]."""

    first: np.ndarray
    second: np.ndarray

    @property
    def cosine(self) -> float:
        """The MaxSim score over the number of the first text's tokens."""
        return float((self.first @ self.second.T).max(1).mean())


class TokenVectorsTask(SimilarityTask):
    """Trains normalized hidden states of tokens, compared by MaxSim: for each token of the first text its largest
    cosine with a token of the other, summed.

    Pairs, or examples with hard negatives, are trained with the cross entropy of the scores of all second texts and
    negatives of the batch. With a teacher's scores, the loss is the KL divergence between the teacher's distribution
    over the positive and the negatives, and that of the scores (ColBERTv2, Santhanam et al., 2022).
    """

    def __init__(
        self,
        language: Language,
        train: Sequence[Any] | None,
        *,
        temperature: float | None = None,
        dimensions: Sequence[int] = (),
        **options: Any,
    ) -> None:
        super().__init__(language, train, temperature=1.0 if temperature is None else temperature, **options)
        if dimensions:
            raise ValueError(f"dimensions: expected with mean vectors, got {tuple(dimensions)} with tokens")
        if self.scored:
            raise DataError("similarity: expected pairs or triplets to train vectors of tokens, got pairs with scores")

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        """The vectors of all texts' tokens: fp32 [texts, max_length, D], 0 after the end of a text."""
        states = normalize(model(**batch.inputs()).last_hidden_state.float(), dim=-1)
        padded = ops.unpack(states, batch.cu_seqlens, batch.max_seqlen)
        return pad(padded, (0, 0, 0, self.language.format.max_length - padded.shape[1]))

    def _loss(self, vectors: Tensor, batch: TaskBatch) -> Tensor:
        if self.processes > 1:
            raise ValueError(f"vectors: expected one process with tokens, got {self.processes}")
        first, second, negative, owner = self._rows(batch.features, vectors.device)
        documents = torch.cat([second, negative])
        lengths = on_device(np.array(_lengths(batch.features), np.int64), vectors.device)
        scores = ops.maxsim(
            vectors[first],
            vectors[documents],
            query_lengths=lengths[first],
            document_lengths=lengths[documents],
        )
        scores = scores / self.temperature
        if not self.taught:
            return cross_entropy(scores, torch.arange(len(first), device=scores.device))
        margins, losses = batch.targets["scores"], []
        columns = torch.arange(len(negative), device=scores.device) + len(first)
        for number in range(len(first)):  # examples may have different numbers of negatives
            positive = owner == number
            student = torch.cat([scores[number, number][None], scores[number, columns[positive]]])
            teacher = torch.cat([margins.new_zeros(1), -margins[positive]])
            losses.append(kl_div(log_softmax(student, 0), softmax(teacher, 0), reduction="sum"))
        return torch.stack(losses).mean()

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        lengths, rows = _lengths(batch.features), logits.float().cpu().numpy()
        texts = iter([row[:length] for row, length in zip(rows, lengths, strict=True)])
        vectors = [[next(texts) for _ in feature.sequences] for feature in batch.features]
        return [TokenPair(pair[0], pair[1]) for pair in vectors]

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        """How often a first text's best second text is its own (``accuracy``), and the mean reciprocal rank at 10
        (``mrr``)."""
        sides = [[pair[side] for pair in predictions] for side in range(2)]
        packed = [torch.from_numpy(np.concatenate(side)) for side in sides]
        ends = [torch.from_numpy(np.cumsum([0, *map(len, side)]).astype(np.int32)) for side in sides]
        scores = ops.maxsim(*packed, query_cu_seqlens=ends[0], document_cu_seqlens=ends[1]).numpy()
        return scores_of_ranks(pair_ranks(scores, np.diagonal(scores).copy()))

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        """The same vector for all texts."""
        same = np.ones((1, 1), dtype=np.float32)
        return [TokenPair(same, same)] * len(examples)

    def save(self, directory: Path, config: Any) -> None:
        """Writes the settings of the vectors, as sentence-transformers and ``fasttfm embed --multi`` read them."""
        kinds = (
            ("", "base.modules.transformer.Transformer"),
            ("1_MultiVectorMask", "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
            ("2_Normalize", "base.modules.normalize.Normalize"),
        )
        modules = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.{kind}"}
            for n, (path, kind) in enumerate(kinds)
        ]
        names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        for name, content in (
            ("modules.json", modules),
            ("1_MultiVectorMask/config.json", {"skiplist_words": []}),
            ("2_Normalize/config.json", names),
            ("sentence_bert_config.json", {"max_seq_length": self.language.format.max_length}),
            ("config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"}),
        ):
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(content, indent=2) + "\n")


def _lengths(features: Sequence[Feature]) -> list[int]:
    """The number of tokens of each text."""
    return [len(sequence.ids) for feature in features for sequence in feature.sequences]
