"""LoRA adapters of a session: several for one model's weights, and one of them for each text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fasttfm.inference.batches import Packed, SortedIds
from fasttfm.inference.formats import Tokens
from fasttfm.models.adapters import adapter_directory, read_adapter
from fasttfm.models.checkpoint_files import CheckpointError
from fasttfm.models.lora import matrices_of, targets_of
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.nn import PackedLayer
from fasttfm.nn.lora import AdaptedLinear, SelectedLinear, Selection

Adapter = str | Sequence[str | None] | None  # the name of the adapter of all inputs, or of each; None for none


class SessionAdapters:
    """The adapters of a session's model, whose linear layers get them.

    Args:
        model: The session's own copy of the model, on its device and in its dtype.
        directories: The directory of each adapter, in PEFT's format, by its name.
    """

    def __init__(self, model: PretrainedModel, directories: Mapping[str, Path]) -> None:
        self.names = list(directories)
        self._selection = Selection()
        by_module: dict[str, list[Any]] = {}
        for index, directory in enumerate(directories.values()):
            adapter = read_adapter(directory)
            if adapter.heads:
                expected = "an adapter without modules_to_save, because the model's head is that of all adapters"
                raise CheckpointError(f"{adapter.path}: expected {expected}, got {', '.join([*adapter.heads][:3])}")
            for name, (target, matrices) in matrices_of(model, adapter).items():
                if not isinstance(target.parent, PackedLayer):
                    if model.base:  # a pooler, which sessions do not compute
                        continue
                    raise CheckpointError(f"{adapter.path}: expected linear layers of transformer layers, got {name}")
                by_module.setdefault(name, [None] * len(self.names))[index] = matrices
        for target in targets_of(model):
            if (by_adapter := by_module.get(target.name)) is None:
                continue
            changed = {block for matrices in by_adapter if matrices is not None for block in matrices.blocks}
            blocks = tuple(block for block in target.blocks if block in changed)
            linear: Any = target.parent._modules[target.linear]
            setattr(target.parent, target.linear, SelectedLinear(linear, blocks, by_adapter, self._selection).eval())

    def of(self, adapters: Tensor | None) -> AbstractContextManager[None]:
        """Runs the model with the adapters of the tokens of a batch, int32 [T], until it is left."""
        return self._selection.of(adapters)


def indices_in(adapters: SessionAdapters | None, adapter: Adapter, count: int) -> Iterator[int]:
    """The index of the adapter of each of ``count`` inputs, -1 for none."""
    names = [] if adapters is None else adapters.names
    chosen = [adapter] * count if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(chosen) != count:
        raise ValueError(f"Session: adapter: expected a name, or one for each of {count} inputs, got {len(chosen)}")
    for name in chosen:
        if name is not None and name not in names:
            known = ", ".join(names) or "None, because the session has no adapters"
            raise ValueError(f"Session: adapter: expected {known}, got {name!r}")
    return iter([-1 if name is None else names.index(name) for name in chosen])


def directories_in(model: str | Path | None, adapters: Mapping[str, str | Path]) -> dict[str, Path]:
    """The directories of adapters: folders in the model's directory, other directories or hub ids."""
    return {name: adapter_directory(model or "", path) for name, path in adapters.items()}


def adapters_of(model: PretrainedModel, directories: Mapping[str, Path], *, packed: bool) -> SessionAdapters | None:
    """The session's adapters, if it has some. ``packed``: whether weights are stored in another layout."""
    if not directories:
        return None
    if packed:
        expected = "without precision, and without bfloat16 on a CPU (adapter= adds one of them to the weights)"
        raise ValueError(f"Session: adapters: expected {expected}, got {', '.join(directories)}")
    return SessionAdapters(model, directories)


def check_unadapted(model: nn.Module) -> None:
    """Raises for a model whose GEMMs are to be in another precision, if a linear layer has an adapter."""
    if any(isinstance(module, AdaptedLinear) for module in model.modules()):
        raise ValueError("Session: precision: expected a model without adapters (models.merge_added_adapter), got one")


def selected(sequences: list[Tokens], adapters: SessionAdapters | None, adapter: Adapter) -> list[Tokens]:
    """The sequences of inputs, each with its adapter."""
    if adapter is None:
        return sequences
    indices = indices_in(adapters, adapter, len(sequences))
    return [tokens._replace(adapter=next(indices)) for tokens in sequences]


def grouped(
    ids: SortedIds, groups: Sequence[tuple[int, int]], sequences: Sequence[Tokens]
) -> tuple[SortedIds, np.ndarray | None]:
    """The same sequences and batches; within a batch those of the same adapter follow each other. And the adapters of
    the ``sequences`` that were given; None if none has one."""
    adapters = np.fromiter((tokens.adapter for tokens in sequences), np.int64, len(sequences))
    if not (adapters >= 0).any():
        return ids, None
    in_order = adapters[ids.order]
    order = np.concatenate([first + np.argsort(in_order[first:last], kind="stable") for first, last in groups])
    lengths = np.diff(ids.cu_seqlens)[order]
    starts = ids.cu_seqlens[:-1][order].astype(np.int64)
    ends = np.zeros(len(order) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    within = np.arange(len(ids.ids)) - np.repeat(ends[:-1], lengths)
    return SortedIds(ids.ids[np.repeat(starts, lengths) + within], ends, ids.order[order]), adapters


def with_adapters(batch: Packed, indices: np.ndarray, adapters: np.ndarray | None) -> Packed:
    """A batch of ``grouped`` sequences with the adapters of its tokens. ``indices``: the indices of its sequences among
    those that were given, whose ``adapters`` these are."""
    if adapters is None:
        return batch
    lengths = np.diff(batch.cu_seqlens)
    of_tokens = np.repeat(adapters[indices], lengths).astype(np.int32)
    return batch._replace(max_seqlen=int(lengths.max()), adapters=of_tokens)
