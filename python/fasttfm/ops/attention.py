"""``attention``: softmax(q k^T) v with dropout, for dense, padded and packed sequences, whole or local."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.attention import reference
from fasttfm.kernels.attention.problem import AttentionProblem, of_sequences, window_bounds
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.rows import contiguous_like, empty_output
from fasttfm.ops import attention_choice, attention_native
from fasttfm.ops.attention_checks import Options, Window, bounds_of, check_call, check_values
from fasttfm.ops.column_sum import column_sum_op
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import Gradient, Output, checked, converted, fields, outputs
from fasttfm.ops.core.backends import (
    Backend,
    BackendRefused,
    always,
    from_triton,
    requested,
    triton_absent,
)
from fasttfm.ops.core.declare import KnownCalls, Op, Selected, define
from fasttfm.ops.core.library import OpFunction, any_requires_grad, needs_gradient, unshared
from fasttfm.ops.linear import autocast

NAME = "attention"
_WEIGHTS = "attention_weights"


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    lengths: Tensor | None = None,
    lengths_k: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of queries to keys and values, sequence by sequence and head by head.

    Args:
        q: ``[B, Sq, H, D]``, or packed ``[T, H, D]`` with ``cu_seqlens``: fp32, bf16 or fp16 (fp64 on the reference
            backend). Without k and v it holds all three: ``[B, S, 3, H, D]`` or ``[T, 3, H, D]``, read in place.
        k, v: ``[B, Sk, Hk, D]`` or ``[Tk, Hk, D]``. Hk divides H: each key/value head has H / Hk query heads.
        causal: Query i attends to keys up to position i + Lk - Lq of its sequence of Lq queries and Lk keys.
        window: ``(left, right)``: keys from ``left`` before that position to ``right`` after; None or -1 for no limit.
        scale: The factor of the scores; 1 / sqrt(D) by default.
        dropout_p: Probability that a weight is set to zero, rounded to a multiple of 1/256; 0 in evaluation.
        cu_seqlens: int32 ``[sequences + 1]``, the first row of each packed sequence, and the row count.
        cu_seqlens_k: The same of k and v, where they are not ``cu_seqlens``.
        max_seqlen, max_seqlen_k: No packed sequence has more queries or keys; T and Tk by default, and at most. Smaller
            bounds save work. They are not validated on the GPU: rows past them get no result.
        lengths: int32 ``[B]``, for dense tensors: how many tokens of each sequence are real. Rows past that are no
            keys, and give zeros and zero gradients.
        lengths_k: The same for k and v, if they differ from ``lengths``.
        bias: ``[1 or B, 1 or H, Sq or more, Sk or more]`` (of packed sequences, B is their number), or without the
            first dimension: added to the scaled scores; -inf excludes a key. Its gradient is summed over what shares
            it, in a fixed order.
        alibi_slopes: fp32 ``[H]``: ``-slope * |i + Lk - Lq - j|`` is added for key j. Has no gradient.
        seed: int64 ``[1]``, decides what is dropped; by default drawn from torch's generator.
        return_lse: Returns ``(out, lse)``.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        ``out`` of q's shape and type, contiguous; 0 where there is no key to attend to. ``lse``, fp32 without gradient,
        is the logarithm of the sum of the exponential scores: ``[B, H, Sq]``, packed ``[H, T]``; -inf without a key.
    """
    options = Options(
        causal,
        window,
        scale,
        dropout_p,
        cu_seqlens,
        cu_seqlens_k,
        max_seqlen,
        max_seqlen_k,
        lengths,
        lengths_k,
        bias,
        alibi_slopes,
        seed,
    )
    out, lse = _call(q, k, v, options, backend, return_lse)
    return out if lse is None or not return_lse else (out, lse)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    lengths: Tensor | None = None,
    lengths_k: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """The weights that ``attention`` sums the values with, before dropout: for distillation and for plots.

    Plain torch, differentiable in q and k; all weights are held in memory. The arguments are ``attention``'s.

    Returns:
        fp32 (fp64 for fp64) ``[B, H, Sq, Sk]``; of packed sequences ``[sequences, H, max_seqlen, max_seqlen_k]``. Rows
        and columns past a sequence's end are 0, like those that the mask excludes.
    """
    options = Options(
        causal=causal,
        window=window,
        scale=scale,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen=max_seqlen,
        max_seqlen_k=max_seqlen_k,
        lengths=lengths,
        lengths_k=lengths_k,
        bias=bias,
        alibi_slopes=alibi_slopes,
    )
    checks.check_floating(_WEIGHTS, "k", k)  # check_call takes None for a part of qkv
    check_call(_WEIGHTS, q, k, k, options)
    problem = _problem(q, k, options)
    bounds = {"max_seqlen": problem.max_seqlen, "max_seqlen_k": problem.max_seqlen_k}  # the shape of the result
    problem = _bounded(q, k, problem)._replace(**bounds)
    _check_values(_WEIGHTS, q, k, problem)
    weights: Tensor = reference.attention_weights(q, k, problem)
    return weights


def _call(
    q: Any, k: Any, v: Any, options: Options, backend: str | None, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out and lse of a checked call; lse may be None if it is not needed."""
    if backend is not None:
        TABLE.check_name(backend)
    asked = requested(backend)
    q, k, v = autocast(q, k, v)
    p, seed = options.dropout_p, options.seed
    if type(p) is not float or not 0.0 <= p <= 1.0:
        checks.check_number(NAME, "dropout_p", p, low=0.0, high=1.0)
    key, calls = None, CALLS if p == 0 else DROPOUT_CALLS
    if options.are_common() and (k is None) is (v is None):
        kinds, tensors = ("fcns", (q,)) if k is None else ("qkvcns", (q, k, v))
        key = calls.key(kinds, *tensors, options.cu_seqlens, options.lengths, seed)
    selected = calls.find(key, asked)
    if selected is None:
        check_call(NAME, q, k, v, options)
    if p != 0 and seed is None:
        options = options._replace(seed=philox.draw_seed(q.device))
    elif p == 0 and seed is not None:
        options = options._replace(seed=None)  # from here on, a seed means dropout
    results: tuple[Tensor, Tensor]
    problem = _problem(q, k, options)
    if key is None:
        apply = _Attention.apply if needs_gradient(q, k, v, options.bias) else forward_op
        results = apply(q, k, v, *problem, asked)
        return results
    problem = _bounded(q, k, problem)
    if selected is None:
        selected = calls.add(
            key, asked, TABLE.select(asked, *_separate(q, k, v), **attention_choice.options_of(problem))
        )
    if torch.is_grad_enabled() and any_requires_grad(q, k, v):
        results = _PlainAttention.apply_plain(q, k, v, problem, selected)
    elif with_lse or selected.backend.infer is None:
        results = _run_forward(selected.backend, q, k, v, problem)
    else:
        _check_given_values(q, k, v, problem)
        return selected.backend.infer(q, k, v, problem), None
    return results


def _problem(q: Tensor, k: Tensor | None, options: Options) -> AttentionProblem:
    """A call as the registered ops get it."""
    causal, window, scale, p, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, *tensors = options
    bounds = bounds_of(q, k, cu_seqlens_k, max_seqlen, max_seqlen_k)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return AttentionProblem(
        cu_seqlens, cu_seqlens_k, *tensors, *bounds, *window_bounds(causal, window), scale, float(p)
    )


def _bounded(q: Tensor, k: Tensor | None, problem: AttentionProblem) -> AttentionProblem:
    """A call as kernels get it. Bounds may be far above the tokens there are; from there on they change nothing, and
    would leave int32."""
    queries = q.shape[-4 if k is None else -3]
    keys = queries if k is None else k.shape[-3]
    bias, slopes = problem.bias, problem.alibi_slopes
    inside = problem.max_seqlen <= queries and problem.max_seqlen_k <= keys
    if inside and problem.window_left <= keys and problem.window_right <= queries and bias is None and slopes is None:
        return problem
    return problem._replace(
        max_seqlen=min(problem.max_seqlen, queries),
        max_seqlen_k=min(problem.max_seqlen_k, keys),
        window_left=min(problem.window_left, keys),
        window_right=min(problem.window_right, queries),
        bias=None if bias is None else _readable(of_sequences(bias)),
        alibi_slopes=None if slopes is None else _readable(slopes),
    )


def _check_values(op: str, q: Tensor, k: Tensor, problem: AttentionProblem) -> None:
    check_values(op, q.shape[-3], problem.max_seqlen, problem.cu_seqlens, problem.lengths)
    check_values(op, k.shape[-3], problem.max_seqlen_k, problem.key_cu_seqlens, problem.key_lengths, suffix="_k")


class _Attention(OpFunction):
    op = NAME
    instead = "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH"

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward_op(q, k, v, *options)
        return _Attention.keep(ctx, q, k, v, out, lse, *options)

    @staticmethod
    def keep(
        ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, lse: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        layout, others = unshared(*options[:_LAYOUT]), options[_LAYOUT:_TENSORS]
        ctx.save_for_backward(q, k, v, out, lse, *layout, *others)
        ctx.numbers = options[_TENSORS:]
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # there is none of lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        saved = () if dout is None else ctx.saved_tensors  # once: gradient checkpointing computes them when it is read
        if dout is not None and any(ctx.needs_input_grad[:3]):
            gradients[:3] = backward_op(dout, *saved, *ctx.numbers)
        if dout is not None and any(ctx.needs_input_grad[_BIAS : _BIAS + 1]):  # common calls have none
            gradients[_BIAS] = bias_backward_op(dout, *saved, *ctx.numbers)
        needed = zip(gradients, ctx.needs_input_grad, strict=True)
        return tuple(gradient if want else None for gradient, want in needed)


class _PlainAttention(_Attention):
    """The function of calls that bypass the dispatcher: it gets the problem as one argument."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, problem: AttentionProblem, selected: Selected
    ) -> tuple[Tensor, Tensor]:
        out, lse = _run_forward(selected.backend, q, k, v, problem)
        return _Attention.keep(ctx, q, k, v, out, lse, *problem, selected.requested)


# ---- torch.library ---------------------------------------------------------------------------------------------------
# k and v are None where q is qkv. Its gradient comes in one piece as dq then, and dk and dv are empty.

_TENSORS = 7  # the first fields of AttentionProblem
_LAYOUT = 4  # the first of them say where sequences are
_BIAS = 3 + _LAYOUT  # among the arguments of _Attention


def _forward(q: Tensor, k: Tensor | None, v: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    *others, backend = options
    problem = _bounded(q, k, AttentionProblem(*others))
    chosen = TABLE.select(backend, *_separate(q, k, v), **attention_choice.options_of(problem))
    return _run_forward(chosen, q, k, v, problem)


def _run_forward(
    chosen: Backend, q: Tensor, k: Tensor | None, v: Tensor | None, problem: AttentionProblem
) -> tuple[Tensor, Tensor]:
    _check_given_values(q, k, v, problem)
    results: tuple[Tensor, Tensor] = chosen.forward(q, k, v, problem)
    return results


def _check_given_values(q: Tensor, k: Tensor | None, v: Tensor | None, problem: AttentionProblem) -> None:
    if problem.cu_seqlens is not None or problem.lengths is not None or problem.lengths_k is not None:
        _check_values(NAME, *_separate(q, k, v)[:2], problem)


def _make_outputs(q: Tensor, k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return attention_native.outputs_like(q.select(-3, 0) if k is None else q)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    *others, backend = options
    gradients = tuple(gradient.make(dout, q, k, v) for gradient in _GRADIENTS)
    dq, dk, dv = gradients[0].unbind(-3) if k is None else gradients
    q, k, v = _separate(q, k, v)
    write_gradients(backend, dout.contiguous(), q, k, v, out, lse, AttentionProblem(*others), dq, dk, dv)
    return gradients


def write_gradients(
    requested: str | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: AttentionProblem,
    *gradients: Tensor,
    column_sums: Tensor | None = None,
) -> bool:
    """Writes dq, dk and dv, by the next backend if the kernel of the chosen one does not fit on the GPU.

    Returns whether the backend has also written ``column_sums``, which not every one can.
    """
    problem = _bounded(q, k, problem)
    call, choice = (q, k, v), attention_choice.options_of(problem)
    arguments: tuple[Any, ...] = (dout, *call, out, lse, problem, *gradients)
    chosen = TABLE.select_backward(requested, *call, **choice)
    try:
        if column_sums is not None and chosen.sums_columns(q, problem):
            chosen.backward(*arguments, column_sums=column_sums)
            return True
        chosen.backward(*arguments)
    except _native.DoesNotFit as error:
        following = TABLE.backward_after(chosen, *call, **choice) if requested is None else None
        if following is None:
            reason = f"backend {chosen.name!r} does not support the backward of this call: {error}"
            raise BackendRefused(f"{NAME}: {reason}") from error
        following.backward(*arguments)
    return False


def _gradient(name: str, index: int) -> Gradient:
    """dq, dk or dv; one that is a part of qkv's is empty."""

    def make(dout: Tensor, *saved: Any) -> Tensor:
        q, tensor = saved[0], saved[index]
        return empty_output(q) if tensor is None else contiguous_like(tensor)

    return Gradient(name, make)


_GRADIENTS = [_gradient(name, index) for index, name in enumerate("qkv")]


def _bias_backward(
    dout: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, lse: Tensor, *options: Any
) -> Tensor:
    *others, backend = options
    q, k, v = _separate(q, k, v)
    problem = _bounded(q, k, AttentionProblem(*others))
    chosen = TABLE.select_backward(backend, q, k, v, **attention_choice.options_of(problem))
    dbias = contiguous_like(options[_LAYOUT])
    whole = dbias[None] if dbias.dim() == 3 else dbias
    if chosen.name == "triton":
        from fasttfm.kernels.attention import triton

        triton.attention_bias_bwd_triton(dout.contiguous(), q, k, v, out, lse, problem, whole)
    else:  # no other backend takes a bias
        reference.attention_bias_backward(dout, q, k, v, out, lse, problem, whole)
    return dbias


def _qkv_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, sums_dtype: torch.dtype, *options: Any
) -> tuple[Tensor, Tensor]:
    *others, backend = options
    dqkv, sums = contiguous_like(qkv), _column_sums_like(qkv, sums_dtype)
    q, k, v = _separate(qkv, None, None)
    gradients, problem = dqkv.unbind(-3), AttentionProblem(*others)
    if write_gradients(backend, dout.contiguous(), q, k, v, out, lse, problem, *gradients, column_sums=sums):
        return dqkv, sums
    return dqkv, column_sum_op(dqkv.flatten(-3), sums_dtype, None)


def _column_sums_like(qkv: Tensor, dtype: torch.dtype) -> Tensor:
    return qkv.new_empty(math.prod(qkv.shape[-3:]), dtype=dtype)


def _separate(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with their last dimension contiguous; views where q is qkv."""
    if k is None or v is None:
        q, k, v = _readable(q).unbind(-3)
        return q, k, v
    return _readable(q), _readable(k), _readable(v)


def _readable(x: Tensor) -> Tensor:
    """Kernels take any strides but the last, which is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from fasttfm.kernels.attention import triton

    results: tuple[Tensor, Tensor] = triton.attention_fwd_triton(*_separate(*args[:3]), args[3])
    return results


def _forward_reference(*args: Any) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = reference.attention_forward(*_separate(*args[:3]), args[3])
    return results


_PROBLEM: Any = fields(AttentionProblem)
# The CPU core comes before Triton, so that Triton's interpreter runs on CPU tensors only if it is requested by name.
# The GPU backends save the same tensors for the backward, so each can compute the backward of the other.
OP = Op(
    NAME,
    inputs=(checked("q"), checked("k", optional=True), checked("v", optional=True), *_PROBLEM[:_TENSORS]),
    options=_PROBLEM[_TENSORS:],
    outputs=outputs("out", "lse", make=_make_outputs),
    saves=("q", "k", "v", "out", "lse", *AttentionProblem._fields[:_TENSORS]),
    backward_options=AttentionProblem._fields[_TENSORS:],
    gradients=_GRADIENTS,
    function=_Attention,
    run_forward=_forward,
    run_backward=_backward,
    backends=(
        Backend(
            "cpu",
            _native.missing,
            attention_choice.refuse_cpu,
            attention_native.forward,
            attention_native.backward,
            infer=attention_native.infer,
        ),
        Backend(
            "cuda",
            _native.missing_hopper,
            attention_choice.refuse_cuda,
            attention_native.forward,
            attention_native.backward,
            refuse_backward=attention_choice.refuse_cuda_backward,
            yield_backward=attention_choice.yield_cuda_backward,
            sums_columns=lambda *call: attention_native.sums_columns(*call),
            infer=attention_native.infer,
        ),
        Backend(
            "triton",
            triton_absent,
            attention_choice.refuse_triton,
            _forward_triton,
            from_triton(NAME, "attention_bwd_triton"),
            refuse_backward=attention_choice.refuse_triton_backward,
        ),
        Backend("reference", always, attention_choice.refuse_nothing, _forward_reference, reference.attention_backward),
    ),
)
TABLE, CALLS = OP.table, OP.known
DROPOUT_CALLS = KnownCalls(TABLE)  # a backend may support a call without dropout, but not with dropout
forward_op, backward_op = OP.forward, OP.backward
bias_backward_op = define(
    f"{NAME}_bias_backward",
    OP.backward_arguments,
    (Output("dbias", lambda *passed: contiguous_like(passed[6 + _LAYOUT])),),
    _bias_backward,
)
# For one qkv, it also returns the sums of its gradient over all tokens: the gradient of the projection's bias.
# Summed up from gradients before or after they are rounded, as the backend can.
qkv_backward_op = define(
    f"{NAME}_qkv_backward",
    (*(checked(name) for name in ("dout", "qkv", "out", "lse")), converted("sums_dtype", "ScalarType"), *_PROBLEM),
    (
        Output("dqkv", lambda dout, qkv, *_: contiguous_like(qkv)),
        Output("sums", lambda dout, qkv, out, lse, dtype, *_: _column_sums_like(qkv, dtype)),
    ),
    _qkv_backward,
)
