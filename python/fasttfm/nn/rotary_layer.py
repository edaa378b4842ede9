"""``RotaryLayer`` and ``RotaryTransformer``: pre-LN layers with rotary positions and a gated feed-forward block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.nn.packed_layer import PackedLayer, draw_seeds
from fasttfm.nn.packed_transformer import NOT_WHOLE, PackedTransformer
from fasttfm.nn.parts import layer_norm, packed_residual_norm, product
from fasttfm.nn.plain import Uncopied
from fasttfm.ops import linear
from fasttfm.ops.backends import Explanation, requested
from fasttfm.ops.layers import spec, stack
from fasttfm.ops.layers.explain import explain
from fasttfm.ops.layers.spec import LayerSpec
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.library import is_plain
from fasttfm.ops.transformer_block import BlockParameters

Table = tuple[Tensor, Tensor]  # cosines and sines [positions, D / 2]
Tables = dict[Any, Table]  # by ``RotaryLayer.table_key``


class RotaryLayer(PackedLayer):
    """ModernBERT's layer: ``x + attention(norm1(x))``, then ``x + down(activation(gate) * up)`` of ``norm2(x)``.

    Queries and keys are rotated by their positions. The module ``up`` computes both gate and up; the gate is its first
    half.

    Args:
        width: C, the model's width.
        heads: The number of attention heads, a divisor of the width.
        intermediate: Columns of the gate, and of up.
        theta: The base of the rotation's wavelengths.
        window: ``(left, right)``: how far before and after itself a token attends; None for no limit.
        first: Whether this is a model's first layer, which has no ``norm1`` because the embeddings are normalised.
        activation: A key of ``ops.ACTIVATIONS``.
        dropout: Dropout probability of the attention weights and of the attention block's output.
        intermediate_dropout: Dropout probability of ``down``'s input.
        eps: Added to variances.
        attention_bias, feed_forward_bias, norm_bias: Whether these parts have biases.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        intermediate: int,
        *,
        theta: float = 10_000.0,
        window: Sequence[int | None] | None = None,
        first: bool = False,
        activation: str = "gelu",
        dropout: float = 0.0,
        intermediate_dropout: float = 0.0,
        eps: float = 1e-5,
        attention_bias: bool = False,
        feed_forward_bias: bool = False,
        norm_bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            width,
            heads,
            2 * intermediate,
            norm_first=True,
            activation=activation,
            dropout=dropout,
            feed_forward_dropout=0.0,
            attention_dropout=dropout,
            eps=eps,
            window=window,
            bias=attention_bias,
            **factory,
        )
        self.theta, self.intermediate_dropout = theta, intermediate_dropout
        self.up = nn.Linear(width, 2 * intermediate, bias=feed_forward_bias, **factory)
        self.down = nn.Linear(intermediate, width, bias=feed_forward_bias, **factory)
        norms = (nn.LayerNorm(width, eps=eps, bias=norm_bias, **factory) for _ in range(2))
        self.norm1, self.norm2 = norms
        if first:
            self.norm1 = None  # type: ignore[assignment]

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        residual: Tensor | None = None,
        next_norm: nn.LayerNorm | None = None,
        seeds: Tensor | None = None,
        tables: Tables | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer. Arguments and results are those of ``PackedLayer`` with ``norm_first``; in addition:

        Args:
            tables: The cosines and sines ``[positions, D / 2]`` of each ``table_key``, if they are already computed.
            positions: int64 ``[T]``; by default each token's index in its own sequence.
        """
        if residual is None:
            residual, x = x, x if self.norm1 is None else layer_norm(self.norm1, x)
        (x,) = linear.autocast(x)
        self.check(x, cu_seqlens, residual, next_norm)
        attention_p, p_a, _ = self.rates()
        seed = seed_a = None
        if attention_p or p_a:
            seed, seed_a, _ = (draw_seeds(x.device) if seeds is None else seeds).split(1)
        qkv = self.rotated(x, cu_seqlens, max_seqlen, tables, positions)
        packed: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        context = ops.attention(
            qkv, window=self.window, max_seqlen=max_seqlen, dropout_p=attention_p, seed=seed, **packed
        )
        assert isinstance(context, Tensor)
        branch, bias = product(self.out, context.flatten(-2))
        y, z = packed_residual_norm(self.norm2, branch, residual, linear_bias=bias, p=p_a, seed=seed_a, **packed)
        hidden, bias = product(self.up, y)
        hidden = ops.gated_activation(hidden, bias, activation=self.activation)
        hidden = functional.dropout(hidden, self.intermediate_dropout, self.training)
        branch, bias = product(self.down, hidden)
        y, z = packed_residual_norm(next_norm, branch, z, linear_bias=bias, **packed)
        return y, None if next_norm is None else z

    def rotated(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        tables: Tables | None,
        positions: Tensor | None,
    ) -> Tensor:
        """Queries, keys and values [T, 3, H, D] of ``x``; queries and keys are rotated. They are one tensor, so that
        attention's gradient is one tensor, too."""
        if positions is None:
            positions = ops.position_ids_from_cu_seqlens(cu_seqlens, total=x.shape[0])
        if tables is None:
            every = torch.arange(max_seqlen, device=x.device)
            tables = {self.table_key(): rotary_tables(self.theta, every, self.width // self.heads, like=x)}
        heads = self.project(x).flatten(1, 2)
        rotated = ops.rotary(heads, *tables[self.table_key()], positions=positions, rotary_heads=2 * self.heads)
        return rotated.unflatten(1, (3, self.heads))

    def table_key(self) -> Any:
        """What the tables of this layer depend on: layers with equal keys share them."""
        return self.theta

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """False: the layer by itself is several ops. ``RotaryTransformer`` runs all layers as one."""
        return False

    def is_described(self) -> bool:
        return type(self).forward is RotaryLayer.forward

    def spec(self, next_norm: nn.LayerNorm, table: int) -> LayerSpec:
        """What the layer computes, with the rotation by the table of this index."""
        attention_p, p_a, _ = self.rates()
        head_dim = self.width // self.heads
        attention = spec.Attention(
            *(self.heads, self.heads, head_dim, *self.window),
            rotary=table,
            rotary_columns=head_dim,
            dropout=attention_p,
        )
        names = zip(BlockParameters._fields, self.block_parameters(next_norm), strict=True)
        return LayerSpec(
            self.width,
            pre_norm=True,
            attention=attention,
            feed_forward=spec.FeedForward(self.down.in_features, ops.ACTIVATIONS[self.activation], gated=True),
            norm_a=spec.Norm("layer", self.norm2.eps),
            norm_b=spec.Norm("layer", next_norm.eps),
            present=frozenset(name for name, parameter in names if parameter is not None),
            dropout_a=p_a,
        )

    def attention_weights(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """The attention weights for ``forward``'s ``x``, fp32 ``[sequences, H, max_seqlen, max_seqlen]``, for plots.
        Computed in plain torch."""
        q, k, _ = self.rotated(x, cu_seqlens, max_seqlen, None, None).unbind(1)
        left, right = self.window
        return ops.attention_weights(q, k, window=(left, right), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


def rotary_tables(theta: float, positions: Tensor, columns: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles ``position * theta ** (-2 i / columns)``, [positions, columns / 2]: in fp32, for
    fp64 tensors in fp64."""
    kind: dict[str, Any] = {"device": like.device, "dtype": _table_type(like)}
    rates = 1.0 / theta ** (torch.arange(0, columns, 2, **kind) / columns)
    angles = positions.to(**kind)[:, None] * rates
    return angles.cos(), angles.sin()


def _table_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class TableCache:
    """The tables that a module keeps, on all devices. A copy or a pickle of the module has none.

    A table of twice as many positions is made for a longer sequence. The shorter ones stay as long as the module,
    because a CUDA graph may read them; all of them together have less than twice the rows of the longest.
    """

    def __init__(self) -> None:
        # Tensors on a device: written once, by the stream of the call that makes them, which waits for them, so that
        # any stream may read them. Graphs that captured a call hold their addresses.
        self._tables: dict[Any, list[Table]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return TableCache, ()

    def get(self, theta: float, columns: int, rows: int, first_rows: int, *, like: Tensor) -> Table:
        """Cosines and sines of at least ``rows`` positions; there are ``first_rows`` at first."""
        known = self._tables.setdefault((theta, columns, like.device, _table_type(like)), [])
        if not known or len(known[-1][0]) < rows:
            longer = first_rows * 2 ** max(0, math.ceil(math.log2(max(1, rows) / first_rows)))
            positions = torch.arange(longer, device=like.device)
            if is_capturing(like):  # the graph makes its own at each replay
                return rotary_tables(theta, positions, columns, like=like)
            with torch.inference_mode(False), torch.no_grad():  # calls that train use them, too
                known.append(rotary_tables(theta, positions, columns, like=like))
            if like.is_cuda:
                torch.cuda.current_stream(like.device).synchronize()
        return known[-1]


class _Specs(Uncopied):
    """A stack's layers as data, and the settings from which they were made."""

    def __init__(self, settings: Any, specs: tuple[LayerSpec, ...]) -> None:
        self.settings, self.specs = settings, specs


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph captures the calls of the current stream."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _settings_of(layer: Any) -> tuple[Any, ...]:
    """What a layer's description depends on, apart from its parameters."""
    return (*layer.rates(), layer.window, layer.activation, layer.heads, layer.norm2.eps, layer.table_key())


class RotaryTransformer(PackedTransformer):
    """A stack of ``RotaryLayer``.

    The tables of cosines and sines are computed at the first call on a device, for all of ``positions``, and kept in
    fp32 (fp64 for fp64 models) for any dtype of the parameters. They grow if a sequence is longer.

    Args:
        layers: The layers; there are tables for each of their ``theta``.
        final_norm: The model's last LayerNorm.
        positions: The initial number of positions in the tables.
    """

    layer_class = RotaryLayer

    def __init__(self, layers: Sequence[RotaryLayer], final_norm: nn.LayerNorm, positions: int) -> None:
        super().__init__(layers, final_norm)
        self.positions = positions
        self._tables = TableCache()

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        hidden_states: list[Tensor] | None = None,
        positions: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """As ``PackedTransformer.forward``. ``positions`` int64 [T] are by default the tokens' indices in their
        sequences. For given ones, which may be any numbers, the call computes the cosines and sines of each token."""
        if positions is None:
            positions = ops.position_ids_from_cu_seqlens(cu_seqlens, total=x.shape[0])
            tables = self.tables(x, max_seqlen)
        else:
            tables = self.make_tables(x, positions)
            positions = torch.arange(len(positions), device=positions.device)
        angles: dict[str, Any] = {"tables": tables, "positions": positions}
        if hidden_states is None and not inputs:
            whole = self._run_described(x, cu_seqlens, max_seqlen, tables, positions)
            if whole is not None:
                return whole
        return super().forward(x, cu_seqlens, max_seqlen, hidden_states=hidden_states, **angles, **inputs)

    def groups(self, max_seqlen: int) -> None:
        """None: the layers are described by ``LayerSpec``."""

    def _run_described(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, tables: Tables, positions: Tensor
    ) -> Tensor | None:
        """The result by the plan of all layers; None if they have to run one by one."""
        call = self._call(x, cu_seqlens, max_seqlen, tables, positions)
        return None if call is None else stack.run_stack(*call)[0]

    def explain(self, x: Tensor, max_seqlen: int) -> Any:
        """How ``forward`` runs the layers for ``x`` [T, C]: by which plan, or one by one. Nothing is computed."""
        cu_seqlens = torch.tensor((0, x.shape[0]), dtype=torch.int32, device=x.device)
        call = self._call(x, cu_seqlens, max_seqlen, self.tables(x, max_seqlen), None)
        if call is None:
            return Explanation("transformer_layers", "modules", {"core": NOT_WHOLE, "modules": None}, "modules")
        return explain(*call)

    def _call(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, tables: Tables, positions: Tensor | None
    ) -> tuple[tuple[LayerSpec, ...], Inputs, list[Tensor | None]] | None:
        """The arguments of ``run_stack``; None if the layers have to run one by one."""
        described = self._described(tables)
        if described is None:
            return None
        specs, parameters = described
        first: Any = next(iter(self.layers))
        residual = x
        if first.norm1 is not None:
            x = layer_norm(first.norm1, x)
        (x,) = linear.autocast(x)
        first.check(x, cu_seqlens, residual, None)
        drops = any(each.dropout_a or each.attention.dropout for each in specs)
        seeds = draw_seeds(x.device, len(specs)) if drops else None
        return specs, Inputs(x, residual, cu_seqlens, max_seqlen, seeds, tuple(tables.values()), positions), parameters

    def _described(self, tables: Tables) -> tuple[tuple[LayerSpec, ...], list[Tensor | None]] | None:
        """The layers as data, and their parameters; None if they have to run one by one: one is not plain or drops
        elements inside of its feed-forward block, gradient checkpointing is on, or the call is compiled."""
        special = self.fp8 is not None or self.int8 is not None or (self.checkpointing and self.training)
        if special or torch.compiler.is_dynamo_compiling() or requested(None) is not None:
            return None
        plain = self.plain_layers()
        parameters = None if plain is None else plain.parameters()
        if plain is None or parameters is None:
            return None
        layers: list[Any] = self.in_order()
        if any(layer.uses_fp8() or (layer.training and layer.intermediate_dropout) for layer in layers):
            return None
        settings = [_settings_of(layer) for layer in layers], [each is None for each in parameters], list(tables)
        known: Any = self.__dict__.get("_specs")
        if known is None or known.settings != settings:
            keys = list(tables)
            specs = tuple(layer.spec(norm, keys.index(layer.table_key())) for layer, norm in plain.layers)
            known = self.__dict__["_specs"] = _Specs(settings, specs)
        return known.specs, parameters

    def tables(self, x: Tensor, max_seqlen: int) -> Tables:
        """The tables of the positions up to ``max_seqlen``. A call that is traced or transformed computes them, because
        a tracer's tensors must not be kept, and a cache cannot be traced."""
        if not is_plain((x,)):
            return self.make_tables(x, torch.arange(max(self.positions, max_seqlen), device=x.device))
        return {
            theta: self._tables.get(theta, columns, max_seqlen, self.positions, like=x)
            for theta, columns in self._rotations().items()
        }

    @torch.no_grad()
    def make_tables(self, x: Tensor, positions: Tensor) -> Tables:
        """The tables of these positions, for ``x``'s device and dtype."""
        rotations = self._rotations().items()
        return {theta: rotary_tables(theta, positions, columns, like=x) for theta, columns in rotations}

    def _rotations(self) -> dict[float, int]:
        """The head size of the layers, by ``theta``."""
        layers: list[Any] = self.in_order()
        return {layer.theta: layer.width // layer.heads for layer in layers}
