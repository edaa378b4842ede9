"""Layers over two packed streams, tokens and the entities that some of them mention (ERNIE of Tsinghua University).

Aggregator of Zhang et al. (2019), with the residual connections and LayerNorms of the released model. ``w`` are all
tokens, ``e`` the entities of the aligned ones, ``b = b_t + b_e``:

    w~ = LN(w + Attention(w))         e~ = LN(e + Attention_e(e)), or e if entities do not attend
    h  = act(W_t w~ + W_e e~ + b)     for aligned tokens
    h  = act(W_t w~ + b)              for the others
    w' = LN(w~ + W_t' h + b_t')       e' = LN(e~ + W_e' h + b_e')
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fasttfm import ops
from fasttfm.nn.packed_layer import PackedLayer
from fasttfm.nn.packed_transformer import PackedTransformer
from fasttfm.nn.parts import packed_residual_norm, product
from fasttfm.nn.plain import is_plain_linear, is_plain_norm
from fasttfm.ops import linear
from fasttfm.ops.core import checks
from fasttfm.ops.layers.knowledge_block import SEEDS, Alignment, KnowledgeOptions, knowledge_block, padded_head_dim
from fasttfm.ops.layers.transformer_block import BlockParameters

_NAME = "KnowledgeLayer"


@dataclass(frozen=True)
class AlignedEntities:
    """Which packed tokens have an entity, and which one. The first token of every sequence always has one, so that no
    sequence is without entities: by default -1, the null entity."""

    ids: Tensor  # int64 [A]: rows of a table of entities; -1 is the null entity
    positions: Tensor  # int64 [A]: the numbers of the aligned tokens, ascending
    cu_seqlens: Tensor  # int32 [sequences + 1]: sequence i has the entities from [i] to [i + 1]
    max_seqlen: int  # an upper bound of the entities of a sequence

    @staticmethod
    def of(entity_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> AlignedEntities:
        """Reads ``entity_ids`` [T], -1 for tokens without an entity; ``max_seqlen`` bounds the sequences' lengths.

        On a GPU this synchronizes: call it in a data pipeline on the CPU, and move the result. On the CPU the bound of
        the entities is also tighter: their largest number, rounded up to a multiple of 64 so that few different values
        occur."""
        checks.check_index("AlignedEntities", "entity_ids", entity_ids)
        checks.check_cu_seqlens("AlignedEntities", cu_seqlens, like=entity_ids)
        aligned = entity_ids >= 0
        bounds = cu_seqlens.long().clamp(0, len(entity_ids))  # on a GPU they are not validated, and may be wrong
        firsts = bounds[:-1][bounds.diff() > 0]
        aligned = aligned.index_fill(0, firsts, True)
        positions = aligned.nonzero().squeeze(1)
        counts = functional.pad(aligned.cumsum(0, dtype=torch.int32), (1, 0)).index_select(0, bounds)
        if counts.device.type == "cpu" and len(counts) > 1:
            max_seqlen = min(max_seqlen, 64 * -(-int(counts.diff().max()) // 64))
        return AlignedEntities(
            ids=entity_ids.index_select(0, positions),
            positions=positions,
            cu_seqlens=counts,
            max_seqlen=max_seqlen,
        )

    @property
    def count(self) -> int:
        """A, the number of aligned tokens."""
        return len(self.ids)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> AlignedEntities:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> AlignedEntities:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> AlignedEntities:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)})


class KnowledgeLayer(PackedLayer):
    """A post-LN layer that mixes tokens and entities. The parameters of the token stream are ``PackedLayer``'s.

    It is one autograd node (ops/layers/knowledge_block.py) while its linear layers and LayerNorms are plain (plain.py);
    otherwise its modules are called. The entity stream has one row per aligned token.

    Args:
        width, heads, intermediate: As in ``PackedLayer``.
        entity_width: E, the width of the entity stream.
        entity_heads: Its number of attention heads, a divisor of ``entity_width``.
        entity_attention: Whether entities attend to each other; otherwise they are only fused.
        last: Whether this is the last layer, whose entities are not needed: the parameters that would compute them
            (``entity_down``, ``entity_norm2``) exist for checkpoints, but are not trained.
        options: Other arguments of ``PackedLayer``.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        intermediate: int,
        *,
        entity_width: int,
        entity_heads: int,
        entity_attention: bool = True,
        last: bool = False,
        eps: float = 1e-12,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(width, heads, intermediate, eps=eps, **factory, **options)
        if self.norm_first or entity_heads < 1 or entity_width % entity_heads:
            expected = f"a divisor of the entity_width {entity_width}, in a post-LN layer"
            raise checks.bad_value(_NAME, "entity_heads", expected, entity_heads)
        self.entity_width, self.entity_heads, self.last = entity_width, entity_heads, last
        self.entity_qkv = nn.Linear(entity_width, 3 * entity_width, **factory) if entity_attention else None
        self.entity_out = nn.Linear(entity_width, entity_width, **factory) if entity_attention else None
        self.entity_norm1 = nn.LayerNorm(entity_width, eps=eps, **factory) if entity_attention else None
        self.entity_up = nn.Linear(entity_width, intermediate, **factory)
        self.entity_down = nn.Linear(intermediate, entity_width, **factory).requires_grad_(not last)
        self.entity_norm2 = nn.LayerNorm(entity_width, eps=eps, **factory).requires_grad_(not last)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        entities: Tensor,
        aligned: AlignedEntities,
        seeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer.

        Args:
            x: Tokens ``[T, C]``.
            cu_seqlens, max_seqlen: The boundaries of the tokens, as in ``PackedLayer``.
            entities: ``[A, E]``.
            aligned: The tokens that the entities belong to.
            seeds: int64 ``[6]``; by default drawn from torch's generator.

        Returns:
            Both streams; None for the entities of the ``last`` layer.
        """
        x, entities = linear.autocast(x, entities)
        self.check(x, cu_seqlens, None, None)
        checks.check_shape(_NAME, "entities", entities, (aligned.count, self.entity_width))
        if not any(self.rates()):
            seeds = None
        elif seeds is None:
            seeds = draw_knowledge_seeds(x.device)
        if self.is_plain():
            where = Alignment(cu_seqlens, aligned.cu_seqlens, aligned.positions)
            options, parameters = self._knowledge_options(max_seqlen, aligned), _of(self._knowledge_modules())
            return knowledge_block(x, entities, where, seeds, options, parameters)
        seed_of_dropout = (None,) * SEEDS if seeds is None else seeds.split(1)
        x = self._attend(x, cu_seqlens, max_seqlen, seed_of_dropout)
        entities = self._attend_to_entities(entities, aligned, seed_of_dropout)
        return self._fuse(x, entities, cu_seqlens, aligned, seed_of_dropout)

    def is_plain(self) -> bool:
        """Whether ``forward`` calls none of the layer's modules, because all are plain."""
        qkv, out, norm1, up, down, norm2, *of_entities = self._knowledge_modules()
        entity_qkv, entity_out, entity_norm1, entity_up, entity_down, entity_norm2 = of_entities
        attention = () if entity_qkv is None else (entity_qkv, entity_out)
        norms = () if entity_norm1 is None else (entity_norm1,)
        return is_plain_linear(qkv, out, up, down, *attention, entity_up, entity_down) and is_plain_norm(
            norm1, norm2, *norms, entity_norm2
        )

    def _knowledge_modules(self) -> tuple[nn.Module | None, ...]:
        """The modules of the tokens, then those of the entities, both in the order of ``BlockParameters``."""
        modules = self._modules
        names = ("qkv", "out", "norm1", "up", "down", "norm2")
        return *(modules[name] for name in names), *(modules.get(f"entity_{name}") for name in names)

    def _knowledge_options(self, max_seqlen: int, aligned: AlignedEntities) -> KnowledgeOptions:
        tokens = self.block_options(max_seqlen, None)
        eps_a = tokens.eps_a if self.entity_norm1 is None else self.entity_norm1.eps
        changes: dict[str, Any] = {
            "eps_a": eps_a,
            "eps_b": self.entity_norm2.eps,
            "window_left": -1,
            "window_right": -1,
        }
        entities = tokens._replace(heads=self.entity_heads, max_seqlen=aligned.max_seqlen, **changes)
        return KnowledgeOptions(tokens, entities, self.last)

    def _attend(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, seeds: Any) -> Tensor:
        """w~"""
        attention_p, p, _ = self.rates()
        context = ops.attention(
            self.project(x), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, dropout_p=attention_p, seed=seeds[0]
        )
        assert isinstance(context, Tensor)
        branch, bias = product(self.out, context.flatten(-2))
        options: dict[str, Any] = {"p": p, "seed": seeds[1], "cu_seqlens": cu_seqlens}
        return packed_residual_norm(self.norm1, branch, x, linear_bias=bias, **options)[0]

    def _attend_to_entities(self, entities: Tensor, aligned: AlignedEntities, seeds: Any) -> Tensor:
        """e~. Heads are padded with zeros to a size that attention's kernels support: ERNIE-base's have 25 columns."""
        if self.entity_qkv is None:
            return entities
        assert self.entity_out is not None
        attention_p, p, _ = self.rates()
        head_dim = self.entity_width // self.entity_heads
        padded = padded_head_dim(head_dim, entities)
        qkv = self.entity_qkv(entities).unflatten(-1, (3, self.entity_heads, head_dim))
        context = ops.attention(
            functional.pad(qkv, (0, padded - head_dim)) if padded > head_dim else qkv,
            scale=head_dim**-0.5,
            cu_seqlens=aligned.cu_seqlens,
            max_seqlen=aligned.max_seqlen,
            dropout_p=attention_p,
            seed=seeds[3],
        )
        assert isinstance(context, Tensor)
        branch, bias = product(self.entity_out, context[..., :head_dim].flatten(-2))
        options: dict[str, Any] = {"p": p, "seed": seeds[4], "cu_seqlens": aligned.cu_seqlens}
        return packed_residual_norm(self.entity_norm1, branch, entities, linear_bias=bias, **options)[0]

    def _fuse(
        self, x: Tensor, entities: Tensor, cu_seqlens: Tensor, aligned: AlignedEntities, seeds: Any
    ) -> tuple[Tensor, Tensor | None]:
        """w' and e' of w~ and e~."""
        branch, entity_branch = self._called(x, entities, aligned)
        _, _, p = self.rates()
        options: dict[str, Any] = {"p": p, "seed": seeds[2], "cu_seqlens": cu_seqlens}
        y, _ = packed_residual_norm(self.norm2, branch, x, **options)
        if entity_branch is None:
            return y, None
        options = {"p": p, "seed": seeds[5], "cu_seqlens": aligned.cu_seqlens}
        return y, packed_residual_norm(self.entity_norm2, entity_branch, entities, **options)[0]

    def _called(self, x: Tensor, entities: Tensor, aligned: AlignedEntities) -> tuple[Tensor, Tensor | None]:
        """``W_t' h + b_t'`` [T, C] and ``W_e' h + b_e'`` [A, E]."""
        positions = aligned.positions
        nothing = self.entity_up(torch.zeros_like(entities[:1]))
        hidden = (self.up(x) + nothing).index_add(0, positions, self.entity_up(entities) - nothing)
        hidden = ops.bias_gelu(hidden, activation=self.activation)
        return self.down(hidden), None if self.last else self.entity_down(hidden.index_select(0, positions))

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """False: a stack of plain layers cannot include it."""
        return False


def draw_knowledge_seeds(device: torch.device, layers: int | None = None) -> Tensor:
    """Seeds of one layer, or of several ``[layers, 6]``, by one call of torch's generator."""
    shape = (SEEDS,) if layers is None else (layers, SEEDS)
    return torch.randint(-(2**63), 2**63 - 1, shape, dtype=torch.int64, device=device)


def _of(modules: tuple[Any, ...]) -> tuple[BlockParameters, BlockParameters]:
    """The parameters of the tokens and of the entities; None for absent modules."""
    values: list[Any] = [
        None if module is None else module._parameters[name] for module in modules for name in ("weight", "bias")
    ]
    half = len(values) // 2
    return BlockParameters(*values[:half]), BlockParameters(*values[half:])


class KnowledgeTransformer(PackedTransformer):
    """A stack of ``PackedLayer`` and ``KnowledgeLayer``. Consecutive ``PackedLayer``s run as one stack."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        entities: Tensor,
        aligned: AlignedEntities,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """Runs the layers over ``x`` [T, C] and ``entities`` [A, E]; ``hidden_states`` collects the token stream before
        each layer."""
        stream: Tensor | None = entities
        parts = self._parts()
        of_layers: Iterator[Any] = itertools.repeat(None)
        if self.training:
            of_layers = iter(draw_knowledge_seeds(x.device, len(parts)).unbind())
        for part, seeds in zip(parts, of_layers, strict=False):
            if isinstance(part, PackedTransformer):
                part.training, part.checkpointing = self.training, self.checkpointing
                x = part(x, cu_seqlens, max_seqlen, hidden_states=hidden_states)
                continue
            if hidden_states is not None:
                hidden_states.append(x)
            run: Any = partial(part, entities=stream, aligned=aligned, seeds=seeds)
            if self.checkpointing and self.training:
                run = partial(checkpoint, run, use_reentrant=False)
            x, stream = run(x, cu_seqlens, max_seqlen)
        return x

    def _parts(self) -> list[nn.Module]:
        """Knowledge layers, and stacks of the others between them, which share their layers with this module."""
        layers = list(self.layers)
        known: tuple[list[nn.Module], list[nn.Module]] | None = self.__dict__.get("_stacks")
        if known is None or known[0] != layers:
            known = self.__dict__["_stacks"] = (layers, list(_stacked(layers)))
        return known[1]


def _stacked(layers: list[nn.Module]) -> Iterator[nn.Module]:
    for plain, group in itertools.groupby(layers, lambda layer: not _is_knowledge_layer(layer)):
        if plain:
            yield PackedTransformer(cast("list[PackedLayer]", list(group)))
        else:
            yield from group


def _is_knowledge_layer(module: nn.Module) -> bool:
    """Whether a module is a knowledge layer, or a wrapper around one."""
    return any(isinstance(inner, KnowledgeLayer) for inner in module.modules())
