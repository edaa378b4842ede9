"""``PackedLayer``: a transformer layer over packed tokens, post-LN as in BERT or pre-LN as in GPT-2."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.nn.lora import AdaptedLinear
from fasttfm.nn.parts import known_activation, layer_norm, linear_activation, packed_residual_norm, product
from fasttfm.nn.plain import is_plain_linear, is_plain_norm
from fasttfm.ops import linear
from fasttfm.ops.attention import window_bounds
from fasttfm.ops.core import checks
from fasttfm.ops.core.backends import requested
from fasttfm.ops.fp8.block import fp8_block
from fasttfm.ops.layers.lora import LINEARS
from fasttfm.ops.layers.spec import FIELDS, Attention, FeedForward, LayerSpec, Norm, Specs
from fasttfm.ops.layers.stack import run_stack
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters, transformer_block
from fasttfm.ops.linear import dense

_NAME = "PackedLayer"
NO_NORM = nn.LayerNorm(1, elementwise_affine=False)  # of a layer without this norm
_PARAMETERS = ("weight", "bias")
SEEDS = 3  # dropout seeds of a layer: for the attention weights and for the outputs of its two blocks


class PackedLayer(nn.Module):
    """Attention and feed-forward block, each with dropout, residual connection and LayerNorm.

    It is one autograd node while its linear layers and LayerNorms are plain (plain.py); modules with hooks and replaced
    ones are called. Dropout probabilities are attributes and not modules; they apply if the layer is in training
    mode.

    Args:
        width: C, the model's width.
        heads: The number of attention heads, a divisor of the width.
        intermediate: Width between the feed-forward block's two linear layers.
        norm_first: Whether LayerNorm comes before the blocks (GPT-2) or after them (BERT).
        activation: A key of ``ops.ACTIVATIONS``.
        dropout: Dropout probability of the blocks' outputs, before they are added to the residual stream.
        feed_forward_dropout: The same for the feed-forward block; ``dropout`` by default.
        attention_dropout: Dropout probability of the attention weights.
        eps: Added to variances.
        causal: Whether tokens attend only to themselves and earlier tokens.
        window: ``(left, right)``: how far before and after itself a token attends; None for no limit.
        bias: Whether the linear layers have a bias.
        qkv_bias: Whether the projection of queries, keys and values has a bias; ``bias`` by default.
        recompute: Whether the backward recomputes the inner LayerNorm instead of saving its result. In 16-bit training
            that saves 22 bytes per token and column (of C) instead of 24.
        keep_activation: Whether the feed-forward block's activation is saved for the backward instead of recomputed: 32
            bytes instead of 24, and the fastest step.
        device, dtype: Device and dtype of the parameters.
    """

    fp8: Any = None  # Fp8Training sets it
    norm = "layer"  # LayerNorm
    has_gate: bool = False  # of the feed-forward block
    # The attributes that determine what ``spec`` returns, in addition to the epsilons of the norms.
    spec_settings: ClassVar[Any] = operator.itemgetter(
        *("training", "dropout", "feed_forward_dropout", "attention_dropout", "heads", "window", "activation"),
        *("recompute", "keep_activation"),
    )

    def __init__(
        self,
        width: int,
        heads: int,
        intermediate: int,
        *,
        norm_first: bool = False,
        activation: str = "gelu",
        dropout: float = 0.1,
        feed_forward_dropout: float | None = None,
        attention_dropout: float = 0.1,
        eps: float = 1e-12,
        causal: bool = False,
        window: Sequence[int | None] | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        recompute: bool = False,
        keep_activation: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise checks.bad_value(_NAME, "heads", f"a divisor of the width {width}", heads)
        known_activation(_NAME, activation)
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.feed_forward_dropout = dropout if feed_forward_dropout is None else feed_forward_dropout
        for name in ("dropout", "feed_forward_dropout", "attention_dropout"):
            checks.check_number(_NAME, name, getattr(self, name), low=0.0, high=1.0)
        factory = {"device": device, "dtype": dtype}
        self.width, self.heads, self.norm_first, self.activation = width, heads, norm_first, activation
        self.window = window_bounds(causal, window)
        self.recompute, self.keep_activation = recompute, keep_activation
        self.qkv = nn.Linear(width, 3 * width, bias=bias if qkv_bias is None else qkv_bias, **factory)
        self.out = nn.Linear(width, width, bias=bias, **factory)
        self.norm1 = nn.LayerNorm(width, eps=eps, **factory)
        self.up = nn.Linear(width, intermediate, bias=bias, **factory)
        self.down = nn.Linear(intermediate, width, bias=bias, **factory)
        self.norm2 = nn.LayerNorm(width, eps=eps, **factory)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        residual: Tensor | None = None,
        next_norm: nn.LayerNorm | None = None,
        seeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer.

        Args:
            x: ``[T, C]``. In a pre-LN model, ``norm1`` of the stream, because LayerNorms are fused with the residual
                addition before them; without a ``residual``, the stream itself.
            cu_seqlens: int32 ``[sequences + 1]``: sequence i has the rows from cu_seqlens[i] to cu_seqlens[i + 1].
            max_seqlen: An upper bound of the sequences' lengths.
            residual: A pre-LN model's stream ``[T, C]``, in x's dtype or fp32; None if the layer has to normalise it.
            next_norm: In a pre-LN model, the LayerNorm that follows: the next layer's ``norm1``, or the model's last.
                None if the next layer normalises the stream itself.
            seeds: int64 ``[3]``; by default drawn from torch's generator. The same seeds drop the same elements.

        Returns:
            ``(y, None)``; in a pre-LN model ``next_norm`` of the stream, and the stream, or ``(stream, None)`` without
            a ``next_norm``.
        """
        if self.norm_first and residual is None:
            residual, x = x, layer_norm(self.norm1, x)
        (x,) = linear.autocast(x)
        self.check(x, cu_seqlens, residual, next_norm)
        rates = self.rates()
        if not any(rates):
            seeds = None
        elif seeds is None:
            seeds = draw_seeds(x.device)
        norm_a, norm_b = (self.norm2, next_norm) if self.norm_first else (self.norm1, self.norm2)
        if not self.is_fusable(next_norm):
            return self._call_modules(x, residual, cu_seqlens, max_seqlen, (norm_a, norm_b), rates, seeds)
        parameters = self.block_parameters(next_norm)
        if self.uses_fp8():
            fp8, options = self.fp8, self.block_options(max_seqlen, next_norm)
            y, z = fp8_block(x, residual, cu_seqlens, seeds, options, parameters, fp8.linears, fp8.following)
        elif torch.compiler.is_dynamo_compiling():
            y, z = transformer_block(
                x, residual, cu_seqlens, seeds, self.block_options(max_seqlen, next_norm), parameters
            )
        else:
            seeds = None if seeds is None else seeds.view(1, SEEDS)
            present = frozenset(name for name, p in zip(FIELDS, parameters, strict=False) if p is not None)
            specs = Specs.of([self.spec(next_norm, None, present)])
            y, z = run_stack(specs, Inputs(x, residual, cu_seqlens, max_seqlen, seeds), [*parameters, None, None])
        return (z, None) if norm_b is None and z is not None else (y, z)

    def block_modules(self, next_norm: nn.LayerNorm | None) -> tuple[Any, ...]:
        """The modules of qkv, out, norm a, up, down and norm b, in the order of ``BlockParameters``. Without a
        ``next_norm``, a pre-LN layer's y is not used."""
        modules: dict[str, Any] = self._modules  # faster than the module's attributes
        norm_a, norm_b = modules["norm1"], modules["norm2"]
        if self.norm_first:
            norm_a, norm_b = norm_b, NO_NORM if next_norm is None else next_norm
        return modules["qkv"], modules["out"], norm_a, modules["up"], modules["down"], norm_b

    def block_parameters(self, next_norm: nn.LayerNorm | None) -> BlockParameters:
        """The layer's parameters of the op."""
        modules = self.block_modules(next_norm)
        return BlockParameters(*(module._parameters[name] for module in modules for name in _PARAMETERS))

    def block_options(self, max_seqlen: int, next_norm: nn.LayerNorm | None) -> BlockOptions:
        """The layer's options of the op."""
        _, _, norm_a, _, _, norm_b = self.block_modules(next_norm)
        known_activation(_NAME, self.activation)
        attention_p, p_a, p_b = self.rates()
        return BlockOptions(
            heads=self.heads,
            max_seqlen=max_seqlen,
            window_left=self.window[0],
            window_right=self.window[1],
            activation=ops.ACTIVATIONS[self.activation],
            attention_p=attention_p,
            p_a=p_a,
            p_b=p_b,
            eps_a=norm_a.eps,
            eps_b=norm_b.eps,
            recompute=self.recompute,
            keep_activation=self.keep_activation,
            backend=requested(None),
        )

    def spec(self, next_norm: nn.LayerNorm | None, table: int | None, present: frozenset[str]) -> LayerSpec:
        """What the layer computes, as data. ``table`` is the index of the tables that rotate queries and keys, and
        ``present`` are the parameters that the layer has."""
        known_activation(_NAME, self.activation)
        attention_p, p_a, p_b = self.rates()
        _, _, norm_a, _, _, norm_b, *_ = self.block_modules(next_norm)
        return LayerSpec(
            self.width,
            pre_norm=self.norm_first,
            attention=self._attention_spec(attention_p, table),
            feed_forward=FeedForward(self.down.in_features, ops.ACTIVATIONS[self.activation], gated=self.has_gate),
            norm_a=Norm(self.norm, norm_a.eps),
            norm_b=Norm(self.norm, norm_b.eps),
            present=present,
            dropout_a=p_a,
            dropout_b=p_b,
            recomputed=self._recomputed(),
        )

    def _recomputed(self) -> frozenset[str]:
        """What the backward computes again, of the names in ``LayerSpec``."""
        again = {"y1": self.recompute, "a": not self.keep_activation and not self.has_gate}
        return frozenset(name for name, is_recomputed in again.items() if is_recomputed)

    def has_spec(self) -> bool:
        """Whether ``spec`` describes everything that the layer computes with its current settings."""
        return True

    def table_key(self) -> Any:
        """What the tables of a layer that rotates queries and keys depend on: layers with equal keys share them."""
        return None

    def _attention_spec(self, dropout: float, table: int | None) -> Attention:
        left, right = self.window
        heads = (self.heads, self.heads, self.width // self.heads)
        return Attention(*heads, window_left=left, window_right=right, dropout=dropout)

    def rates(self) -> tuple[float, float, float]:
        """The current dropout probabilities: of the attention weights, the attention block and the feed-forward
        block."""
        if not self.training:
            return 0.0, 0.0, 0.0
        p_a, p_b, attention_p = self.probabilities()
        return attention_p, p_a, p_b

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """Whether ``forward`` calls none of the layer's modules, because all are plain."""
        return self.has_plain_modules(next_norm)

    def has_plain_modules(self, next_norm: nn.Module | None = None) -> bool:
        """Whether the layer's linear layers and LayerNorms, and ``next_norm``, are plain."""
        modules = self._modules
        linears = is_plain_linear(modules["qkv"], modules["out"], modules["up"], modules["down"])
        return linears and self.has_plain_norms(next_norm)

    def has_readable_modules(self, next_norm: nn.Module | None = None) -> bool:
        """Whether a plan may read the parameters of the layer's modules: they are plain, or have adapters, which say at
        each call whether they may be read."""
        modules = self._modules
        linears = [modules[name] for name in LINEARS if not isinstance(modules[name], AdaptedLinear)]
        return is_plain_linear(*linears) and self.has_plain_norms(next_norm)

    def has_plain_norms(self, next_norm: nn.Module | None) -> bool:
        """Whether its norms and ``next_norm`` are plain, and of the kind that ``spec`` names."""
        modules = self._modules
        norm = next_norm if self.norm_first else modules["norm1"]
        norms = (modules["norm2"],) if norm is None else (modules["norm2"], norm)
        return is_plain_norm(*norms)

    def is_described(self) -> bool:
        """Whether one op computes what this class's ``forward`` does: not that of a subclass that overrides it."""
        return type(self) is PackedLayer

    def uses_fp8(self) -> bool:
        """Whether ``forward`` has FP8 operands in its GEMMs, if the layer's modules are plain."""
        return self.fp8 is not None and self.training and torch.is_grad_enabled()

    def _call_modules(
        self,
        x: Tensor,
        residual: Tensor | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        norms: tuple[nn.Module, nn.Module | None],
        rates: tuple[float, float, float],
        seeds: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The forward if some modules are not plain: those are called, the others are fused."""
        context = ops.attention(
            self.project(x),
            window=self.window,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            dropout_p=rates[0],
            seed=None if seeds is None else seeds[:1],
        )
        assert isinstance(context, Tensor)
        return self._after_attention(context, x if residual is None else residual, cu_seqlens, norms, rates, seeds)

    def first_tokens(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, seeds: Tensor | None) -> Tensor:
        """The rows of ``forward``'s y that belong to the first tokens of the sequences, ``[sequences, C]``, for a
        post-LN layer without a window whose modules are plain. Of the other tokens, only keys and values are computed.
        The arguments are ``forward``'s; the same seeds drop the same elements."""
        weights = self.qkv.weight.split([self.width, 2 * self.width])
        biases = (None, None) if self.qkv.bias is None else self.qkv.bias.split([self.width, 2 * self.width])
        stream = x.index_select(0, cu_seqlens[:-1].clamp(max=len(x) - 1))
        heads = (self.heads, self.width // self.heads)
        q = dense(stream, weights[0], biases[0]).unflatten(-1, heads)
        k, v = dense(x, weights[1], biases[1]).unflatten(-1, (2, *heads)).unbind(1)
        query_cu_seqlens = torch.arange(len(cu_seqlens), dtype=torch.int32, device=x.device)
        attention_p, _, _ = rates = self.rates()
        context = ops.attention(
            q,
            k,
            v,
            cu_seqlens=query_cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen=1,
            max_seqlen_k=max_seqlen,
            dropout_p=attention_p,
            seed=None if seeds is None else seeds[:1],
        )
        assert isinstance(context, Tensor)
        return self._after_attention(context, stream, query_cu_seqlens, (self.norm1, self.norm2), rates, seeds)[0]

    def _after_attention(
        self,
        context: Tensor,
        stream: Tensor,
        cu_seqlens: Tensor,
        norms: tuple[nn.Module, nn.Module | None],
        rates: tuple[float, float, float],
        seeds: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``forward``'s result, given attention's and the residual stream; tensors have a row for each token of
        ``cu_seqlens``."""
        _, p_a, p_b = rates
        _, seed_a, seed_b = (None, None, None) if seeds is None else seeds.split(1)
        packed: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        branch, bias = self.attention_output(context.flatten(-2))
        y, z = packed_residual_norm(norms[0], branch, stream, linear_bias=bias, p=p_a, seed=seed_a, **packed)
        branch, bias = self.feed_forward(y)
        stream = z if self.norm_first else y
        y, z = packed_residual_norm(norms[1], branch, stream, linear_bias=bias, p=p_b, seed=seed_b, **packed)
        return y, z if self.norm_first and norms[1] is not None else None

    def attention_output(self, context: Tensor) -> tuple[Tensor, Tensor | None]:
        """The attention block's output for its heads' [..., H * D], without the last bias, and this bias."""
        return product(self.out, context)

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The feed-forward block's output for its input, without the last bias, and this bias."""
        return product(self.down, linear_activation(self.up, self.activation, x))

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values [T, 3, H, D] of ``x`` [T, C]."""
        if is_plain_linear(self.qkv):
            return ops.qkv_projection(x, self.qkv.weight, self.qkv.bias, self.heads)
        qkv: Tensor = self.qkv(x)
        return qkv.unflatten(-1, (3, self.heads, self.width // self.heads))

    def probabilities(self) -> tuple[float, float, float]:
        """The dropout probabilities in training: of the attention block, the feed-forward block and the attention
        weights."""
        return self.dropout, self.feed_forward_dropout, self.attention_dropout

    def attention_weights(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """The attention weights for ``forward``'s ``x``, fp32 ``[sequences, H, max_seqlen, max_seqlen]``, for plots and
        distillation. Computed in plain torch."""
        left, right = self.window
        q, k, _ = self.project(x).unbind(-3)
        return ops.attention_weights(q, k, window=(left, right), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)

    def check(self, x: Any, cu_seqlens: Any, residual: Any, next_norm: Any) -> None:
        checks.check_floating(_NAME, "x", x)
        width = self.width
        if x.dim() != 2 or x.shape[1] != width or not x.is_contiguous():
            got = f"shape {tuple(x.shape)} with strides {x.stride()}"
            raise checks.bad_value(_NAME, "x", f"a contiguous [T, {width}]", got)
        checks.check_cu_seqlens(_NAME, cu_seqlens, like=x)
        known_activation(_NAME, self.activation)
        for name, argument in (("residual", residual), ("next_norm", next_norm)):
            if argument is not None and not self.norm_first:
                raise checks.bad_value(_NAME, name, "None in a post-LN model", type(argument).__name__)
        checks.check_shape(_NAME, "residual", residual, x.shape)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, activation={self.activation}, norm_first={self.norm_first}"


def biased_backend(x: Tensor, bias: Tensor | None) -> str | None:
    """The backend of ``ops.attention`` for a ``bias``: a CPU has no other than the reference."""
    return "reference" if bias is not None and x.is_cpu and requested(None) is None else None


def draw_seeds(device: torch.device, layers: int | None = None) -> Tensor:
    """Seeds of one layer, or of several ``[layers, 3]``, by one call of torch's generator."""
    shape = (SEEDS,) if layers is None else (layers, SEEDS)
    return torch.randint(-(2**63), 2**63 - 1, shape, dtype=torch.int64, device=device)
