"""The contenders of benchmarks/training_step.py: their models and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fasttfm
from fasttfm.bench.handmade_bert import HandmadeBert
from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Family, Head
from fasttfm.ops import cu_seqlens_from_lengths

CONTENDERS = (
    "fasttfm",
    "fasttfm-graph",
    "fasttfm-fast",
    "fasttfm-fast-graph",
    "fasttfm-recompute",
    "fasttfm-fp8",
    "fasttfm-fp8-graph",
    "handmade",
    "handmade-compile",
    "hf",
    "hf-compile",
    "hf-patched",
    "hf-patched-compile",
)
_NOT_IN_TRANSFORMERS = ("recompute", "keep_activation", "model_type", "architectures")  # of a configuration's fields
PREDICTED = 0.15  # of the tokens, in masked language models; replaced ones for a discriminator
MEASURED = {name: family for name, family in FAMILIES.items() if family.benchmark is not None}


@dataclass(frozen=True)
class Case:
    """A model's name, "bert-large", and the shape of its batch."""

    name: str
    batch: int
    sequence: int
    padded: bool
    vocabulary: int | None = None

    @property
    def family(self) -> Family:
        return MEASURED[self.name.split("-")[0]]

    @property
    def head(self) -> Head:
        assert self.family.benchmark is not None
        return self.family.benchmark

    @property
    def model(self) -> type[Any]:
        """Ours; that of transformers has the same name."""
        return self.family.models[self.head]

    def config(self, **changes: Any) -> Any:
        size = self.name.partition("-")[2]
        if self.vocabulary is not None:
            changes["vocab_size"] = self.vocabulary
        return self.family.config.named(size, **changes)


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [B, S]
    lengths: list[int]
    mask: Tensor | None  # bool [B, S]; None where every length is S
    chosen: Tensor  # bool [B, S]: predicted or replaced
    positions: Tensor  # of the chosen tokens, in [B * S]
    packed_positions: Tensor  # the same among the packed tokens


def make_batch(case: Case, vocabulary: int, device: torch.device) -> Batch:
    """The same ids and lengths for every contender. Padded, lengths are spread evenly from S/8 to S."""
    batch, sequence = case.batch, case.sequence
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocabulary, (batch, sequence), generator=generator)
    first = sequence // 8 if case.padded else sequence
    lengths = torch.linspace(first, sequence, batch).round().int().tolist()
    there = torch.arange(sequence) < torch.tensor(lengths)[:, None]
    chosen = (torch.rand(batch, sequence, generator=generator) < PREDICTED) & there
    packed = torch.full((batch * sequence,), -1)
    packed[there.flatten()] = torch.arange(int(there.sum()))
    positions = chosen.flatten().nonzero().squeeze(1)
    tensors = (tensor.to(device) for tensor in (ids, there, chosen, positions, packed[positions]))
    ids, there, chosen, positions, packed_positions = tensors
    return Batch(ids, lengths, there if case.padded else None, chosen, positions, packed_positions)


def necessary_flops(case: Case, config: Any, lengths: Sequence[int], predicted: int) -> float:
    """FLOPs of a step's GEMMs and attention over real tokens, and of a masked-LM head over predicted tokens: forward,
    and twice that backward."""
    gpt = case.head is Head.CAUSAL_LM
    layers, width = (config.n_layer, config.n_embd) if gpt else (config.num_hidden_layers, config.hidden_size)
    inner = 4 * width if gpt else config.intermediate_size
    tokens = sum(lengths)
    scores = sum(length * length for length in lengths) / (2 if gpt else 1)
    body = layers * (2 * tokens * width * (4 * width + 2 * inner) + 4 * scores * width)
    embedding = getattr(config, "embedding_size", width)
    factor = 2 * tokens * embedding * width if embedding != width else 0
    heads = {
        Head.MASKED_LM: 2 * predicted * embedding * (width + config.vocab_size),
        Head.CAUSAL_LM: 2 * tokens * width * config.vocab_size,
        Head.REPLACED_TOKENS: 2 * tokens * width * width,
    }
    return 3.0 * (body + factor + heads[case.head])


def build(name: str, case: Case, batch: Batch, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A contender's model, and a function that computes its loss."""
    torch.manual_seed(0)
    if name.startswith("fasttfm"):
        _, *ways = name.split("-")
        return _ours(case, batch, device, recompute="recompute" in ways, keep_activation="fast" in ways)
    if name.startswith("handmade"):
        if not case.name.startswith("bert"):
            raise ValueError(f"contender {name}: expected a BERT, got {case.name}")
        model = HandmadeBert(case.config()).to(device).train()
        labels = batch.ids.flatten()[batch.positions]
        call: Any = torch.compile(model) if name.endswith("compile") else model
        return model, lambda: call(batch.ids, batch.mask, labels, batch.positions)
    return _transformers(case, batch, device, patched="patched" in name, compiled=name.endswith("compile"))


def _ours(case: Case, batch: Batch, device: torch.device, **memory: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = case.model(case.config(**memory)).to(device).train()
    options = layout(batch)
    ids, chosen = (tensor if batch.mask is None else tensor[batch.mask] for tensor in (batch.ids, batch.chosen))
    if case.head is Head.MASKED_LM:
        options |= {"labels": batch.ids.flatten()[batch.positions], "positions": batch.packed_positions}
    else:
        options["labels"] = chosen.long() if case.head is Head.REPLACED_TOKENS else ids
    return model, lambda: model(ids, **options).loss


def layout(batch: Batch) -> dict[str, Any]:
    """The arguments with which our models get a batch with padding: packed, as ``fasttfm.data`` collates it."""
    if batch.mask is None:
        return {}
    return {
        "cu_seqlens": cu_seqlens_from_lengths(batch.lengths, device=batch.ids.device),
        "max_seqlen": batch.ids.shape[1],
    }


def _transformers(
    case: Case, batch: Batch, device: torch.device, *, patched: bool, compiled: bool
) -> tuple[nn.Module, Callable[[], Tensor]]:
    import transformers

    ours = case.config().to_dict()
    fields = {key: value for key, value in ours.items() if key not in _NOT_IN_TRANSFORMERS}
    config = getattr(transformers, case.family.config.__name__)(**fields)
    model = getattr(transformers, case.model.__name__)(config).to(device).train()
    labels = {
        Head.MASKED_LM: torch.where(batch.chosen, batch.ids, -100),
        Head.CAUSAL_LM: batch.ids if batch.mask is None else torch.where(batch.mask, batch.ids, -100),
        Head.REPLACED_TOKENS: batch.chosen.long(),
    }[case.head]
    # Tokenizers give a mask, and Trainer passes it on, where there is no padding too.
    mask = torch.ones_like(batch.ids) if batch.mask is None else batch.mask.long()
    if patched:
        fasttfm.patch(model)
    call = torch.compile(model) if compiled else model
    return model, lambda: call(batch.ids, attention_mask=mask, labels=labels).loss
