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
from fasttfm.nn.packed_transformer import PackedTransformer
from fasttfm.nn.parts import layer_norm, packed_residual_norm, product
from fasttfm.ops import linear

Tables = dict[float, tuple[Tensor, Tensor]]  # cosines and sines [positions, D / 2] by theta


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
            tables: The cosines and sines ``[positions, D / 2]`` of each ``theta``, if they are already computed.
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
            tables = {self.theta: rotary_tables(self.theta, every, self.width // self.heads, like=x)}
        heads = self.project(x).flatten(1, 2)
        rotated = ops.rotary(heads, *tables[self.theta], positions=positions, rotary_heads=2 * self.heads)
        return rotated.unflatten(1, (3, self.heads))

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """False: there is no op for the whole layer."""
        return False

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
        self._tables: dict[tuple[torch.device, torch.dtype], Tables] = {}

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
            tables = self._make_tables(x, positions)
            positions = torch.arange(len(positions), device=positions.device)
        angles: dict[str, Any] = {"tables": tables, "positions": positions}
        return super().forward(x, cu_seqlens, max_seqlen, hidden_states=hidden_states, **angles, **inputs)

    def tables(self, x: Tensor, max_seqlen: int) -> Tables:
        """Cosines and sines by ``theta``. Under torch.compile each call computes them, because a cache cannot be
        traced."""
        if torch.compiler.is_compiling():
            return self._make_tables(x, torch.arange(max(self.positions, max_seqlen), device=x.device))
        key = (x.device, _table_type(x))
        if key not in self._tables or len(next(iter(self._tables[key].values()))[0]) < max_seqlen:
            # Twice as many as before, so that they grow a few times only.
            longer = self.positions * 2 ** max(0, math.ceil(math.log2(max(1, max_seqlen) / self.positions)))
            with torch.inference_mode(False):  # calls that train use them, too
                self._tables[key] = self._make_tables(x, torch.arange(longer, device=x.device))
        return self._tables[key]

    @torch.no_grad()
    def _make_tables(self, x: Tensor, positions: Tensor) -> Tables:
        layers: list[Any] = self.in_order()
        thetas = dict.fromkeys(layer.theta for layer in layers)
        sizes = [layer.width // layer.heads for layer in layers[:1]]
        return {theta: rotary_tables(theta, positions, *sizes, like=x) for theta in thetas}
