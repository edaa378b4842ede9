"""``RotaryLayer`` and ``RotaryTransformer``: layers with rotary positions and a gated feed-forward block."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.nn.layer_norm import OffsetRMSNorm, RMSNorm
from fasttfm.nn.packed_layer import NO_NORM, PackedLayer, biased_backend, draw_seeds
from fasttfm.nn.packed_transformer import Call, PackedTransformer, layer_in
from fasttfm.nn.parts import layer_norm, linear_activation, linear_layer, packed_residual_norm, product
from fasttfm.nn.plain import is_plain_norm, is_plain_rms_norm
from fasttfm.nn.rotation import Theta, at_length, is_scaled_by_length, longest_of, rates
from fasttfm.ops import linear
from fasttfm.ops.core import checks
from fasttfm.ops.core.backends import requested
from fasttfm.ops.core.library import is_plain
from fasttfm.ops.layers import stack
from fasttfm.ops.layers.spec import Attention

Table = tuple[Tensor, Tensor]  # cosines and sines [positions, D / 2]
Tables = dict[Any, Table]  # by ``RotaryLayer.table_key``

_NAME = "RotaryLayer"
_NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm, "offset_rms": OffsetRMSNorm}
_BLOCK_VALUES = 16  # of a layer: weight and bias of each of ``RotaryLayer.block_modules``


def rotary_norm(kind: str, width: int, eps: float, *, bias: bool, **factory: Any) -> nn.Module:
    """The LayerNorm or RMSNorm of a ``RotaryLayer``'s kind; only the former has a bias."""
    options = {"bias": bias} if kind == "layer" else {}
    return _NORMS[kind](width, eps=eps, **options, **factory)


class RotaryLayer(PackedLayer):
    """A layer of ModernBERT, Llama or Qwen3: ``x + attention(norm1(x))``, then ``x + down(activation(gate) * up)`` of
    ``norm2(x)``. Without ``norm_first``, the norms follow the residual additions (NomicBERT).

    Queries and keys are rotated by their positions. The module ``qkv`` computes all queries, then all keys, then all
    values. The module ``up`` computes both gate and up; the gate is its first half.

    Args:
        width: C, the model's width.
        heads: The number of attention heads, a divisor of the width.
        intermediate: Columns of the gate, and of up.
        theta: The base of the rotation's wavelengths, or a scaled rotation; None for no rotation.
        window: ``(left, right)``: how far before and after itself a token attends; None for no limit.
        norm_first: Whether the norms come before the blocks or after them.
        first: Whether this is a pre-LN model's first layer, which has no ``norm1`` because the embeddings are
            normalised.
        activation: A key of ``ops.ACTIVATIONS``.
        dropout: Dropout probability of the attention block's output.
        attention_dropout: Dropout probability of the attention weights; ``dropout`` by default.
        feed_forward_dropout: Dropout probability of the feed-forward block's output.
        intermediate_dropout: Dropout probability of ``down``'s input.
        eps: Added to variances.
        attention_bias, feed_forward_bias, norm_bias: Whether these parts have biases.
        kv_heads: The number of heads of keys and of values, a divisor of ``heads``; ``heads`` by default.
        head_dim: Columns of a head; ``width / heads`` by default.
        norm: "layer" for LayerNorm, "rms" for RMSNorm, or "offset_rms" for ``nn.OffsetRMSNorm``.
        head_norm: Whether each head of queries and keys has an RMSNorm, of the same kind, before it is rotated.
        block_norms: Whether each block's output is normalized, too, before it is added to the stream.
        scale: The factor of the attention scores; ``1 / sqrt(head_dim)`` by default.
        gated: Whether the feed-forward block has a gate; without one it is ``down(activation(up))``.
    """

    spec_settings = operator.itemgetter(
        *("training", "dropout", "feed_forward_dropout", "attention_dropout", "intermediate_dropout", "has_gate"),
        *("heads", "kv_heads", "head_dim", "window", "activation", "norm_first", "norm", "theta", "scale"),
    )

    def __init__(
        self,
        width: int,
        heads: int,
        intermediate: int,
        *,
        theta: Theta | None = 10_000.0,
        window: Sequence[int | None] | None = None,
        norm_first: bool = True,
        first: bool = False,
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        feed_forward_dropout: float = 0.0,
        intermediate_dropout: float = 0.0,
        eps: float = 1e-5,
        attention_bias: bool = False,
        feed_forward_bias: bool = False,
        norm_bias: bool = False,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: str = "layer",
        head_norm: bool = False,
        block_norms: bool = False,
        scale: float | None = None,
        gated: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if norm not in _NORMS:
            raise checks.bad_value(_NAME, "norm", f"one of {', '.join(_NORMS)}", repr(norm))
        super().__init__(
            width,
            heads if head_dim is None else 1,
            intermediate,
            norm_first=norm_first,
            activation=activation,
            dropout=dropout,
            feed_forward_dropout=feed_forward_dropout,
            attention_dropout=dropout if attention_dropout is None else attention_dropout,
            eps=eps,
            window=window,
            bias=attention_bias,
            **factory,
        )
        self.heads, self.theta, self.has_gate, self.intermediate_dropout = heads, theta, gated, intermediate_dropout
        self.up = nn.Linear(width, intermediate * (2 if gated else 1), bias=feed_forward_bias, **factory)
        self.down = nn.Linear(intermediate, width, bias=feed_forward_bias, **factory)
        self.norm = norm
        norms: list[Any] = [rotary_norm(norm, width, eps, bias=norm_bias, **factory) for _ in range(2)]
        self.norm1, self.norm2 = norms[0], norms[1]
        if first:
            self.norm1 = None  # type: ignore[assignment]
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = width // heads if head_dim is None else head_dim
        if heads < 1 or self.kv_heads < 1 or heads % self.kv_heads:
            raise checks.bad_value(_NAME, "kv_heads", f"a divisor of the {heads} heads", self.kv_heads)
        if self.head_dim < 2 or self.head_dim % 2:
            raise checks.bad_value(_NAME, "head_dim", "an even number", self.head_dim)
        attended = heads * self.head_dim
        if (self.kv_heads, attended) != (heads, width):
            columns = attended + 2 * self.kv_heads * self.head_dim
            self.qkv = nn.Linear(width, columns, bias=attention_bias, **factory)
            self.out = nn.Linear(attended, width, bias=attention_bias, **factory)
        self.scale = scale
        of_heads = "rms" if norm == "layer" else norm
        more: list[Any] = [
            rotary_norm(kind, columns, eps, bias=False, **factory) if is_present else None
            for kind, columns, is_present in ((of_heads, self.head_dim, head_norm), (norm, width, block_norms))
            for _ in range(2)
        ]
        self.q_norm, self.k_norm, self.attention_norm, self.feed_forward_norm = more

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
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer. Arguments and results are those of ``PackedLayer``; in addition:

        Args:
            tables: The cosines and sines ``[positions, D / 2]`` of each ``table_key``, if they are already computed.
            positions: int64 ``[T]``; by default each token's index in its own sequence.
            bias: Added to the attention scores, as ``ops.attention``'s.
        """
        if residual is None and self.norm_first:
            residual, x = x, x if self.norm1 is None else layer_norm(self.norm1, x)
        (x,) = linear.autocast(x)
        self.check(x, cu_seqlens, residual, next_norm)
        attention_p, p_a, p_b = self.rates()
        seed = seed_a = seed_b = None
        if attention_p or p_a or p_b:
            seed, seed_a, seed_b = (draw_seeds(x.device) if seeds is None else seeds).split(1)
        parts = self.attention_inputs(x, *self._angles(x, cu_seqlens, max_seqlen, tables, positions))
        packed: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        context = ops.attention(
            *parts,
            window=self.window,
            max_seqlen=max_seqlen,
            scale=self.scale,
            bias=bias,
            dropout_p=attention_p,
            seed=seed,
            backend=biased_backend(x, bias),
            **packed,
        )
        assert isinstance(context, Tensor)
        branch, linear_bias = self.attention_output(context.flatten(-2))
        norm_a, norm_b = (self.norm2, next_norm) if self.norm_first else (self.norm1, self.norm2)
        stream = x if residual is None else residual
        y, z = packed_residual_norm(norm_a, branch, stream, linear_bias=linear_bias, p=p_a, seed=seed_a, **packed)
        branch, linear_bias = self.feed_forward(y)
        stream = z if self.norm_first else y
        y, z = packed_residual_norm(norm_b, branch, stream, linear_bias=linear_bias, p=p_b, seed=seed_b, **packed)
        return y, z if self.norm_first and next_norm is not None else None

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.has_gate:
            hidden, bias = product(self.up, x)
            hidden = ops.gated_activation(hidden, bias, activation=self.activation)
        else:
            hidden = linear_activation(self.up, self.activation, x)
        hidden = functional.dropout(hidden, self.intermediate_dropout, self.training)
        return self.feed_forward_output(hidden)

    def feed_forward_output(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._normalized(self.feed_forward_norm, self.down, hidden)

    def attention_output(self, context: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._normalized(self.attention_norm, self.out, context)

    @staticmethod
    def _normalized(norm: nn.Module | None, linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """``norm(linear(x))``; without a norm, the product and its bias."""
        return product(linear, x) if norm is None else (layer_norm(norm, linear_layer(linear, x)), None)

    def _angles(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, tables: Tables | None, positions: Tensor | None
    ) -> tuple[Tables, Tensor]:
        """The tables and positions of a call that may not give them."""
        if positions is None:
            positions = ops.position_ids_from_cu_seqlens(cu_seqlens, total=x.shape[0])
        if tables is None and self.theta is None:
            return {}, positions
        if tables is None:
            assert self.theta is not None
            every = torch.arange(max_seqlen, device=x.device)
            theta = at_length(self.theta, self.head_dim, longest_of([self.theta], cu_seqlens, max_seqlen))
            tables = {self.table_key(): rotary_tables(theta, every, self.head_dim, like=x)}
        return tables, positions

    def rotated(self, x: Tensor, tables: Tables, positions: Tensor) -> Tensor:
        """The heads of queries, keys and values [T, heads, D] of ``x``; those of queries and keys are rotated. They are
        one tensor, so that attention's gradient is one tensor, too."""
        heads = linear_layer(self.qkv, x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            assert self.k_norm is not None
            q, k, v = self.split_heads(heads)
            heads = torch.cat((self.q_norm(q), self.k_norm(k), v), 1)
        if self.theta is None:
            return heads
        rotated: Tensor = ops.rotary(
            heads, *tables[self.table_key()], positions=positions, rotary_heads=self.heads + self.kv_heads
        )
        return rotated

    def attention_inputs(self, x: Tensor, tables: Tables, positions: Tensor) -> tuple[Tensor, ...]:
        """The arguments of ``ops.attention``: queries, keys and values in one tensor [T, 3, H, D], or three tensors if
        there are fewer heads of keys and values."""
        heads = self.rotated(x, tables, positions)
        return (heads.unflatten(1, (3, self.heads)),) if self.kv_heads == self.heads else self.split_heads(heads)

    def split_heads(self, heads: Tensor) -> tuple[Tensor, ...]:
        """Splits ``heads`` [T, heads, D] into those of queries, of keys and of values."""
        return heads.split((self.heads, self.kv_heads, self.kv_heads), 1)

    def table_key(self) -> Any:
        """What the tables of this layer depend on: layers with equal keys share them."""
        return self.theta

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """False: the layer by itself is several ops. ``RotaryTransformer`` runs all layers as one."""
        return False

    def has_spec(self) -> bool:
        """There is none if it drops elements inside of its feed-forward block, or its norms of heads have different
        epsilons; nor with a bias or dropout in a sum before an RMSNorm, which plans add in the GEMM."""
        drops = self.training and self.intermediate_dropout
        if self.norm == "rms":
            _, p_a, p_b = self.rates()
            biased = any(getattr(linear, "bias", None) is not None for linear in (self.out, self.down))
            drops = bool(drops or p_a or p_b or biased)
        return not drops and (self.q_norm is None or self.q_norm.eps == self.k_norm.eps)

    def is_described(self) -> bool:
        """Layers without a rotation are not: those that there are have a bias."""
        return type(self).forward is RotaryLayer.forward and self.theta is not None

    def has_plain_norms(self, next_norm: nn.Module | None) -> bool:
        modules = self._modules
        norm = next_norm if self.norm_first else modules["norm1"]
        norms = (modules["norm2"],) if norm is None else (modules["norm2"], norm)
        heads = [modules[name] for name in ("q_norm", "k_norm") if modules.get(name) is not None]
        plain = modules.get("attention_norm") is None and modules.get("feed_forward_norm") is None
        kind = is_plain_rms_norm if self.norm == "rms" else is_plain_norm
        return plain and is_plain_rms_norm(*heads) and kind(*norms)

    def block_modules(self, next_norm: nn.LayerNorm | None) -> tuple[Any, ...]:
        """The modules of ``PackedLayer``, then the norms of the heads of queries and keys."""
        heads = (self._modules.get(name) for name in ("q_norm", "k_norm"))
        return *super().block_modules(next_norm), *(NO_NORM if norm is None else norm for norm in heads)

    def _attention_spec(self, dropout: float, table: int | None) -> Attention:
        return Attention(
            self.heads,
            self.kv_heads,
            self.head_dim,
            window_left=self.window[0],
            window_right=self.window[1],
            rotary=table,
            rotary_columns=self.head_dim,
            scale=self.scale,
            dropout=dropout,
            head_norm_eps=None if self.q_norm is None else self.q_norm.eps,
        )

    def attention_weights(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, bias: Tensor | None = None) -> Tensor:
        """The attention weights for ``forward``'s ``x``, fp32 ``[sequences, H, max_seqlen, max_seqlen]``, for plots.
        Computed in plain torch; ``bias`` is ``forward``'s."""
        angles = self._angles(x, cu_seqlens, max_seqlen, None, None)
        q, k, _ = self.split_heads(self.rotated(x, *angles))
        k = k.repeat_interleave(self.heads // self.kv_heads, 1)
        left, right = self.window
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "bias": bias}
        return ops.attention_weights(q, k, window=(left, right), scale=self.scale, **options)


def rotary_tables(theta: Theta | Tensor, positions: Tensor, columns: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles ``position * theta ** (-2 i / columns)``, [positions, columns / 2]: in fp32, for
    fp64 tensors in fp64."""
    kind: dict[str, Any] = {"device": like.device, "dtype": _table_type(like)}
    by_pair, factor = rates(theta, columns, **kind)
    angles = positions.to(**kind)[:, None] * by_pair
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


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

    def get(self, theta: Any, columns: int, rows: int, first_rows: int, *, like: Tensor) -> Table:
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


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph captures the calls of the current stream."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class RotaryTransformer(PackedTransformer):
    """A stack of ``RotaryLayer``.

    The tables of cosines and sines are computed at the first call on a device, for all of ``positions``, and kept in
    fp32 (fp64 for fp64 models) for any dtype of the parameters. They grow if a sequence is longer.

    Args:
        layers: The layers; there are tables for each of their ``theta``.
        final_norm: The norm that ends a pre-LN model.
        positions: The initial number of positions in the tables.
    """

    layer_class = RotaryLayer

    def __init__(self, layers: Sequence[RotaryLayer], final_norm: nn.LayerNorm | None, positions: int) -> None:
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
        """Runs the layers, as ``PackedTransformer`` does. ``positions`` int64 [T] are by default the tokens' indices in
        their sequences. For given ones, which may be any numbers, the call computes the cosines and sines of each
        token."""
        longest = longest_of(self.rotations(), cu_seqlens, max_seqlen)
        if positions is None:
            positions = ops.position_ids_from_cu_seqlens(cu_seqlens, total=x.shape[0])
            every = torch.arange(max_seqlen, device=x.device) if isinstance(longest, Tensor) else None
            tables = self.tables(x, max_seqlen) if every is None else self.make_tables(x, every, longest)
        else:
            tables = self.make_tables(x, positions, longest)
            positions = torch.arange(len(positions), device=positions.device)
        angles: dict[str, Any] = {"tables": tables, "positions": positions}
        if hidden_states is None and not inputs:
            if self.packed is not None:
                whole: Tensor | None = self.packed.run(x, cu_seqlens, max_seqlen, tables, positions)
                if whole is not None:
                    return whole
            call = self.call_of(x, cu_seqlens, max_seqlen, tables, positions)
            if call is not None:
                return stack.run_stack(*call)[0]
        return super().forward(x, cu_seqlens, max_seqlen, hidden_states=hidden_states, **angles, **inputs)

    def call_of(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        tables: Mapping[Any, Table] = MappingProxyType({}),
        positions: Tensor | None = None,
    ) -> Call | None:
        """The result is also None if another backend is requested than the core's."""
        is_replaced = self.packed is not None and not self.packed.is_copy
        special = self.fp8 is not None or is_replaced or requested(None) is not None
        return None if special or not tables else super().call_of(x, cu_seqlens, max_seqlen, tables, positions)

    def angles(self, x: Tensor, max_seqlen: int) -> tuple[Any, ...]:
        return self.tables(x, max_seqlen), None

    def tables(self, x: Tensor, max_seqlen: int) -> Tables:
        """The tables of the positions up to ``max_seqlen``. A call that is traced or transformed computes them, because
        a tracer's tensors must not be kept, and a cache cannot be traced."""
        if not is_plain((x,)):
            every = torch.arange(max(self.positions, max_seqlen), device=x.device)
            return self.make_tables(x, every, max_seqlen)
        rotations = self.rotations().items()
        if any(is_scaled_by_length(theta, max_seqlen) for theta, _ in rotations):  # each length has tables of its own
            return self.make_tables(x, torch.arange(max_seqlen, device=x.device), max_seqlen)
        return {
            theta: self._tables.get(at_length(theta, columns, max_seqlen), columns, max_seqlen, self.positions, like=x)
            for theta, columns in rotations
        }

    @torch.no_grad()
    def make_tables(self, x: Tensor, positions: Tensor, longest: int | Tensor) -> Tables:
        """The tables of these positions, for ``x``'s device and dtype and texts of up to ``longest`` tokens."""
        rotations = {
            theta: (at_length(theta, columns, longest), columns) for theta, columns in self.rotations().items()
        }
        return {theta: rotary_tables(at, positions, columns, like=x) for theta, (at, columns) in rotations.items()}

    def rotations(self) -> dict[Theta, int]:
        """The head size of the layers, by ``theta``."""
        layers: Any = map(layer_in, self.layers)
        return {layer.theta: layer.head_dim for layer in layers if layer.theta is not None}
