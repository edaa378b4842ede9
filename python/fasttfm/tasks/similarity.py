"""``SimilarityTask``: vectors of texts that are close if the texts belong together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss, normalize

from fasttfm import ops
from fasttfm._atomic_files import write_text
from fasttfm.data.lines import DataError
from fasttfm.data.pair_files import read_similarity
from fasttfm.inference.pooling import POOLING, Tokens
from fasttfm.models.family import Head
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.nn.packed_batch import on_device
from fasttfm.tasks.inputs import Feature, TaskBatch, collate
from fasttfm.tasks.labels import table
from fasttfm.tasks.metrics import Scores, value_scores
from fasttfm.tasks.task import Language, Predictions, Task
from fasttfm.train.distributed import gathered_rows
from fasttfm.train.gradient_cache import cached_loss
from fasttfm.train.settings import at_least

_BLOCK = 1024  # how many rows of the similarity matrix are computed at a time
_MAX_RANK = 10  # larger ranks count 0 in the mean reciprocal rank


class Pair(NamedTuple):
    """The normalized vectors of an example's two texts: fp32 [D]."""

    first: np.ndarray
    second: np.ndarray

    @property
    def cosine(self) -> float:
        return float(self.first @ self.second)


class SimilarityTask(Task):
    """Trains vectors of texts, the mean over their tokens, which are compared by cosine similarity.

    Pairs, or examples with hard negatives, are trained with ``ops.contrastive_loss``, with the other examples of the
    batch as negatives, those of all processes. Examples with a teacher's scores are trained with the MSE between the
    differences of the teacher's scores of the positive and of each negative, and those of the cosines over the
    temperature (margin MSE, Hofstätter et al., 2020). Pairs with scores are trained with the MSE between their cosine
    and the score divided by the largest score.

    Args:
        temperature: The temperature of the contrastive loss and of margin MSE.
        dimensions: The loss is the mean of those of vectors that keep only their first elements, each of these numbers
            of them (Matryoshka embeddings, Kusupati et al., 2022); by default that of whole vectors.
        mini_batch: How many examples the model computes at a time, while the loss still uses the whole batch
            (``train.cached_loss``). By default the whole batch.
    """

    name = "similarity"
    distills = False
    about = "text vectors, by pairs or triplets"
    file_format = "anchor, positive; optionally negative, negative_1, ..., score, positive_score and negative_score"
    read_file = staticmethod(read_similarity)
    head = Head.NONE
    options = ("temperature", "mini_batch", "dimensions", "vectors", "flops_weight")
    main_score = "mrr"  # spearman if pairs have scores

    def __init__(
        self,
        language: Language,
        train: Sequence[Any] | None,
        *,
        temperature: float | None = None,
        mini_batch: int | None = None,
        dimensions: Sequence[int] = (),
        **options: Any,
    ) -> None:
        super().__init__(language, train, **options)
        temperature = 0.05 if temperature is None else temperature
        if not temperature > 0:
            raise ValueError(f"temperature: expected a number above 0, got {temperature}")
        if mini_batch is not None:
            at_least("mini_batch", mini_batch, 1)
        for dimension in dimensions:
            at_least("dimensions", dimension, 1)
        self.temperature, self.mini_batch, self.dimensions = temperature, mini_batch, tuple(dimensions)
        taught = sum(example.teacher is not None for example in train or ())
        if train is not None and 0 < taught < len(train):
            got = f"{taught} of {len(train)}"
            raise DataError(
                f"{self.name}: expected a teacher's scores for all training examples or for none, got {got}"
            )
        self.taught = bool(taught)
        scores = [example.label for example in train or () if example.label is not None]
        if train is not None and 0 < len(scores) < len(train):
            got = f"{len(scores)} of {len(train)}"
            raise DataError(f"{self.name}: expected a score for all training examples or for none, got {got}")
        self.largest = max(map(abs, scores), default=0.0) or 1.0
        self.scored = bool(scores)

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        def sequences(example: Any) -> list[Any]:
            texts = [example.first, example.second, *example.negatives]
            return [self.language.format.one(self.language.tokenizer.encode(text)) for text in texts]

        def target(example: Any) -> list[float]:
            """The score, or the teacher's margins."""
            if example.teacher is not None:
                return [example.teacher[0] - score for score in example.teacher[1:]]
            return [0.0 if example.label is None else example.label]

        return [Feature(index, sequences(example), target(example)) for index, example in enumerate(examples)]

    def targets(self, batch: TaskBatch) -> dict[str, Tensor]:
        every = [value for feature in batch.features for value in feature.target]
        return {"scores": torch.tensor(every, dtype=torch.float32, device="cpu")}

    def adjust(self, model: PretrainedModel) -> None:
        """Excludes optional parts of the model, such as a pooler, from training: no vector reads them, and
        DistributedDataParallel would wait for their gradients."""
        super().adjust(model)
        for part in model.names.optional if model.base else ():
            module = getattr(model, part, None)
            if module is not None:
                module.requires_grad_(False)

    # ---- vectors -----------------------------------------------------------------------------------------------------

    def logits(self, model: Any, batch: TaskBatch) -> Tensor:
        """The normalized vectors of all texts of a batch: fp32 [texts, D]."""
        states = model(**batch.inputs()).last_hidden_state
        return normalize(POOLING["mean"](Tokens(states.float(), batch.cu_seqlens, batch.max_seqlen)), dim=-1)

    def losses(self, model: Any, batch: TaskBatch) -> tuple[Tensor, ...]:
        features, size = batch.features, self.mini_batch
        if size is None or len(features) <= size:
            return (self._loss(self.logits(model, batch), batch),)
        device, segments = batch.input_ids.device, self.language.format.segments
        parts = [collate(features[first : first + size], segments) for first in range(0, len(features), size)]
        loss = cached_loss(
            lambda part: self.logits(model, part.to(device)), parts, lambda vectors: self._loss(vectors, batch)
        )
        return (loss,)

    def _loss(self, vectors: Tensor, batch: TaskBatch) -> Tensor:
        """The loss of a batch's vectors, the mean over ``dimensions``."""
        width = vectors.shape[1]
        if any(dimension > width for dimension in self.dimensions):
            raise ValueError(f"dimensions: expected numbers from 1 to {width}, got {max(self.dimensions)}")
        parts = [normalize(vectors[:, :dimension], dim=-1) for dimension in self.dimensions] or [vectors]
        return torch.stack([self._loss_of(part, batch) for part in parts]).mean()

    def _loss_of(self, vectors: Tensor, batch: TaskBatch) -> Tensor:
        first, second, negative, owner = self._rows(batch.features, vectors.device)
        queries, keys, negatives = vectors[first], vectors[second], vectors[negative]
        cosines = (queries * keys).sum(-1)
        if self.taught:
            margins = cosines[owner] - (queries[owner] * negatives).sum(-1)
            return mse_loss(margins / self.temperature, batch.targets["scores"])
        if self.scored:
            return mse_loss(cosines, batch.targets["scores"] / self.largest)
        return self._contrastive(queries, keys, negatives, is_filler=batch.count == 0)

    def _contrastive(self, queries: Tensor, keys: Tensor, negatives: Tensor, *, is_filler: bool) -> Tensor:
        """The contrastive loss of this process's queries. ``is_filler`` says that they are there only because each
        process computes something: then they are no candidates of others, and their loss is 0."""
        labels = None
        if self.processes > 1 and torch.is_grad_enabled():
            rows = slice(0, 0 if is_filler else None)
            (keys, first), (negatives, _) = gathered_rows(keys[rows]), gathered_rows(negatives[rows])
            labels = torch.arange(first, first + len(queries), device=keys.device)
            if is_filler:  # its backward has the gathered tensors of the others' backward
                gathered = [keys.sum(), *([negatives.sum()] if len(negatives) else [])]
                return (queries.sum() + sum(gathered)) * 0
        hard = negatives if len(negatives) else None
        loss = ops.contrastive_loss(queries, keys, hard, labels=labels, temperature=self.temperature)
        assert isinstance(loss, Tensor)
        return loss

    @staticmethod
    def _rows(features: Sequence[Feature], device: torch.device) -> list[Tensor]:
        """The rows of the first texts, of the second texts and of the negatives in the vectors of a batch, and the
        example of each negative."""
        counts = np.array([len(feature.sequences) for feature in features], dtype=np.int64)
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), counts - 2)
        every = np.arange(counts.sum())
        negative = np.setdiff1d(every, np.concatenate([first, first + 1]), assume_unique=True)
        return [on_device(rows, device) for rows in (first, first + 1, negative, owner)]

    # ---- predictions -------------------------------------------------------------------------------------------------

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        first, second, _, _ = self._rows(batch.features, logits.device)
        sides = (logits[rows].float().cpu().numpy() for rows in (first, second))
        return [Pair(*vectors) for vectors in zip(*sides, strict=True)]

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        return list(read)

    def labelled(self, examples: Sequence[Any]) -> bool:
        return True

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        """Correlations of scores and cosines. Without scores, how often a first text's nearest neighbour among all
        second texts is its own (``accuracy``), and the mean reciprocal rank at 10 (``mrr``)."""
        if all(example.label is not None for example in examples):
            return value_scores([example.label for example in examples], [pair.cosine for pair in predictions])
        return retrieval_scores(*(np.stack([pair[side] for pair in predictions]) for side in range(2)))

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        """The same vector for all texts."""
        same = np.ones(1, dtype=np.float32)
        return [Pair(same, same)] * len(examples)

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        rows = ((index, f"{pair.cosine:.6f}") for index, pair in enumerate(predictions))
        return {"predictions.tsv": table(("index", "cosine"), rows, "\t")}

    def save(self, directory: Path, config: Any) -> None:
        """Writes the settings of the vectors, as sentence-transformers and ``fasttfm embed`` read them."""
        length = self.language.format.max_length
        names = ("models.Transformer", "models.Pooling", "models.Normalize")
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{name}"}
            for number, (name, path) in enumerate(zip(names, ("", "1_Pooling", "2_Normalize"), strict=True))
        ]
        width = next(getattr(config, name) for name in ("hidden_size", "dim", "n_embd") if hasattr(config, name))
        pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
        for name, content in (
            ("modules.json", modules),
            ("1_Pooling/config.json", pooling),
            ("sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False}),
        ):
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            write_text(path, json.dumps(content, indent=2) + "\n")
        (directory / "2_Normalize").mkdir(exist_ok=True)


def retrieval_scores(queries: np.ndarray, keys: np.ndarray) -> Scores:
    """Accuracy and mean reciprocal rank of retrieving key i with query i, by cosine; ties get their mean rank."""
    paired = (queries * keys).sum(-1)
    ranks = np.empty(len(queries))
    for first in range(0, len(queries), _BLOCK):
        rows = slice(first, first + _BLOCK)
        ranks[rows] = pair_ranks(queries[rows] @ keys.T, paired[rows], first)
    return scores_of_ranks(ranks)


def pair_ranks(scores: np.ndarray, paired: np.ndarray, first: int = 0) -> np.ndarray:
    """The rank of each query's own key among all, ties at their mean rank. Row i of ``scores`` [n, keys], which is
    changed, is that of query ``first + i``, whose score with its own key is ``paired[i]``."""
    scores[np.arange(len(scores)), np.arange(first, first + len(scores))] = -np.inf
    above, equal = (scores > paired[:, None]).sum(1), (scores == paired[:, None]).sum(1)
    ranks: np.ndarray = 1 + above + equal / 2
    return ranks


def scores_of_ranks(ranks: np.ndarray) -> Scores:
    """How many ranks are 1, and the mean reciprocal rank at ``_MAX_RANK``."""
    in_range = ranks <= _MAX_RANK
    return {"accuracy": float((ranks == 1).mean()), "mrr": float(np.where(in_range, 1 / ranks, 0.0).mean())}
