"""``FeatureRunner``: runs a model on the features of a task, for evaluation and predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.inference import Session
from fasttfm.inference.batches import Packed, plan
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.ops.core.library import PLAIN_TENSORS
from fasttfm.tasks.inputs import Feature, TaskBatch
from fasttfm.tasks.task import Task

_IN_FLIGHT = 2  # batches that are launched before the first one is synchronized
_MAX_FEATURES = 1 << 20  # of a batch: only the number of tokens limits it
# The default number of tokens in a batch; on a GPU larger ones, for which the launches take less time than the kernels.
_MAX_TOKENS = {"cuda": 16384, "cpu": 4096}


class FeatureRunner:
    """Computes ``Task.read`` of features. Features of similar length are computed together.

    If the task's logits are those of the model's head over packed ids (``Task.on_session``), a session computes them;
    its weights are cast once. Otherwise the model is called under autocast.

    Args:
        model: The model, on the device where it is to run; it is set to evaluation mode.
        tokens: The maximum number of tokens in a batch; a longer feature is a batch by itself. By default 16,384 on a
            GPU and 4,096 on a CPU.
        precision: ``"float32"``; any other name means bf16.
        max_graphs: The maximum number of CUDA graphs of the session.
    """

    def __init__(
        self,
        model: PretrainedModel,
        task: Task,
        *,
        tokens: int | None = None,
        precision: str = "float32",
        max_graphs: int = 0,
    ) -> None:
        self.model, self.task = model.eval(), task
        self._device = next(model.parameters()).device
        self.tokens = _MAX_TOKENS.get(self._device.type, 4096) if tokens is None else tokens
        self._dtype = torch.float32 if precision == "float32" else torch.bfloat16
        self._max_graphs = max_graphs
        self._session = self._new_session()

    def _new_session(self) -> Session | None:
        if self.task.on_session and all(type(parameter) in PLAIN_TENSORS for parameter in self.model.parameters()):
            sizes: dict[str, Any] = {"max_tokens": self.tokens, "max_graphs": self._max_graphs}
            return Session(self.model, dtype=self._dtype, answers=self.task.answers_of_session, **sizes)
        return None

    def refresh(self) -> None:
        """Follows the model, whose parameters or modules have changed."""
        self.model.eval()
        if self._session is None or not self._session.take_weights(self.model):
            self._session = self._new_session()

    def read(self, features: Sequence[Feature]) -> list[Any]:
        """The result of ``Task.read`` for each feature."""
        results: list[Any] = [None] * len(features)
        groups = plan([max(1, feature.tokens) for feature in features], self.tokens, _MAX_FEATURES)
        launched: deque[tuple[list[int], Callable[[], list[Any]]]] = deque()
        for group, finish in self._launched(groups, features):
            launched.append((group, finish))
            if len(launched) > _IN_FLIGHT:
                _put(results, *launched.popleft())
        for group, finish in launched:
            _put(results, group, finish)
        return results

    def _launched(
        self, groups: list[list[int]], features: Sequence[Feature]
    ) -> Iterator[tuple[list[int], Callable[[], list[Any]]]]:
        for group in groups:
            batch = self.task.batch([features[index] for index in group])
            if self._session is None or batch.others:
                read = self._called(batch)
                yield group, lambda read=read: read  # type: ignore[misc]
            else:
                packed = _packed(batch, self.task.session_segments(batch))
                rows = self._session.run(packed, self.task.session_output)
                yield group, lambda batch=batch, rows=rows: self.task.read_rows(batch, rows())  # type: ignore[misc]

    @torch.inference_mode()
    def _called(self, batch: TaskBatch) -> list[Any]:
        batch = batch.to(self._device)
        enabled = self._dtype != torch.float32
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=enabled):
            logits: Tensor = self.task.logits(self.model, batch)
            return self.task.read(batch, logits)


def _put(results: list[Any], group: list[int], finish: Callable[[], list[Any]]) -> None:
    for index, result in zip(group, finish(), strict=True):
        results[index] = result


def _packed(batch: TaskBatch, segments: Tensor | None) -> Packed:
    return Packed(
        batch.input_ids.numpy().astype(np.int32),
        None if segments is None or not bool(segments.any()) else segments.numpy().astype(np.int32),
        batch.cu_seqlens.numpy(),
        int(batch.cu_seqlens.diff().max()),
    )
