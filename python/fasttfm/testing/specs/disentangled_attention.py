"""disentangled_attention: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.disentangled_attention import reference
from fasttfm.ops import cu_seqlens_from_lengths, disentangled_attention, log_distance_rows
from fasttfm.testing.random_sizes import random_scale, random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, TritonKernel, draw, op_case, spoil

_TABLES = ("position_keys", "position_queries")
_BIASES = ("key_bias", "segment_bias")
_XLNET: dict[str, Any] = {"tables": _TABLES[:1], "biases": _BIASES, "farthest": None, "span": 80}


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    lengths, heads, columns = case.sizes["lengths"], case.sizes["heads"], case.sizes["columns"]
    longest, span = max(lengths, default=0), case.sizes["span"]
    packed, scale = case.sizes["packed"], case.sizes.get("scale", 1.0)
    shape = (sum(lengths),) if packed else (len(lengths), longest)
    inputs: Inputs = {
        name: draw(generator, *shape, heads, columns, dtype=dtype, device=device, scale=scale) for name in "qkv"
    }
    inputs["distance_rows"] = log_distance_rows(max(1, longest), span, case.sizes["farthest"], device=device)
    for table in _TABLES:
        present = table in case.sizes["tables"]
        inputs[table] = draw(generator, 2 * span, heads, columns, dtype=dtype, device=device) if present else None
    for name in _BIASES:
        present = name in case.sizes.get("biases", ())
        inputs[name] = draw(generator, *shape, heads, dtype=dtype, device=device, scale=scale) if present else None
    of_segments = inputs["segment_bias"] is not None
    inputs["segments"] = torch.randint(3, shape, generator=generator).to(device) if of_segments else None
    inputs["cu_seqlens"] = cu_seqlens_from_lengths(lengths, device=device) if packed else None
    share = case.sizes.get("share")
    inputs["mask"] = None if share is None else (torch.rand(shape, generator=generator) < share).to(device)
    inputs["seed"] = torch.tensor([99], device=device)
    return inputs


def _case(name: str, lengths: Sequence[int], columns: int = 16, **sizes: Any) -> OpCase:
    options = {"dropout_p": sizes.pop("dropout_p", 0.0), "max_seqlen": None, "scale": sizes.pop("factor", None)}
    default_sizes = {"heads": 2, "span": 8, "farthest": 40, "tables": _TABLES, "packed": True}
    return op_case(name, options, lengths=tuple(lengths), columns=columns, **{**default_sizes, **sizes})


_SINGLE = (torch.float32,)
CASES = (
    _case("typical", (70, 5, 33)),
    _case("dropout", (30, 67), 24, dropout_p=0.3),
    _case("dense", (66, 66), packed=False, dtypes=_SINGLE),
    _case("mask", (70, 70), packed=False, share=0.6, heads=1),
    _case("masked_dropout", (20, 20), packed=False, share=0.5, dropout_p=0.2, dtypes=_SINGLE),
    _case("keys_only", (9, 66), tables=("position_keys",), dtypes=_SINGLE),
    _case("queries_only", (9, 66), tables=("position_queries",), dtypes=_SINGLE),
    _case("no_table", (9, 20), tables=(), dtypes=_SINGLE),
    _case("xlnet", (70, 5, 66), **_XLNET),
    _case("xlnet_mask", (66, 66), packed=False, share=0.6, dropout_p=0.3, **_XLNET),
    _case("key_bias", (9, 20), biases=_BIASES[:1], dtypes=_SINGLE),
    _case("every_distance", (40, 12), farthest=None, span=64, factor=0.1, dtypes=_SINGLE),
    _case("empty_sequences", (0, 3, 0), dtypes=_SINGLE),
    _case("no_tokens", (), interpret=False, dtypes=_SINGLE),
    _case("deberta", (200, 130), 64, heads=3, span=256, farthest=512, interpret=False),
    _case("wide", (90,), 128, heads=1, interpret=False),
)


def _random_case(source: random.Random) -> OpCase:
    packed = source.random() < 0.6
    lengths = [random_size(source, 150) for _ in range(source.randint(1, 4))]
    span = source.choice((2, 8, 32))
    sizes: dict[str, Any] = {
        "packed": packed,
        "heads": source.randint(1, 3),
        "span": span,
        "farthest": source.choice((None, 4 * span)),
        "tables": source.choice((_TABLES, _TABLES[:1], _TABLES[1:], ())),
        "biases": source.choice((_BIASES, _BIASES[:1], _BIASES[1:], ())),
        "share": None if packed else source.choice((None, 0.7)),
        "scale": random_scale(source),
        "dropout_p": source.choice((0.0, 0.3)),
    }
    return _case("random", lengths if packed else [max(lengths)] * len(lengths), random_size(source, 128), **sizes)


# ---- costs and peers -------------------------------------------------------------------------------------------------


def _cost(case: OpCase, dtype: torch.dtype, tensors: int, products: int) -> Cost:
    lengths, heads, columns = case.sizes["lengths"], case.sizes["heads"], case.sizes["columns"]
    pairs = float(sum(length**2 for length in lengths)) * heads * columns
    return Cost(tensors * sum(lengths) * heads * columns * dtype.itemsize, 2.0 * products * pairs)


def _padded_attention(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """As transformers writes it, for a padded batch."""
    q, k, v = (inputs[name] for name in "qkv")
    batch, longest, heads, columns = q.shape
    token = torch.arange(longest, device=q.device)
    places = inputs["distance_rows"].long()[token[:, None] - token + longest - 1]
    places = places.expand(batch * heads, longest, longest)

    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(batch * heads, -1, columns)

    def run() -> Tensor:
        rows, keys = flat(q), flat(k)
        position_keys, position_queries = (inputs[name].transpose(0, 1).repeat(batch, 1, 1) for name in _TABLES)
        scores = rows @ (keys.mT / (3 * columns) ** 0.5)
        bias = (rows @ position_keys.mT).gather(-1, places) + (keys @ position_queries.mT).gather(-1, places.mT).mT
        weights = (scores + bias / (3 * columns) ** 0.5).softmax(-1)
        return (weights @ flat(v)).unflatten(0, (batch, heads)).transpose(1, 2)

    return run


BAD_CALLS = (
    BadCall("q of integers", "q", TypeError, spoil("q", torch.ones(108, 2, 16).long())),
    BadCall("padded q next to cu_seqlens", "q", ValueError, spoil("q", torch.ones(3, 36, 2, 16))),
    BadCall("packed q without cu_seqlens", "q", ValueError, spoil("cu_seqlens", None)),
    BadCall("fewer keys", "k", ValueError, spoil("k", torch.ones(107, 2, 16))),
    BadCall("values of another type", "v", TypeError, spoil("v", torch.ones(108, 2, 16).half())),
    BadCall("k elsewhere", "k", ValueError, spoil("k", torch.ones(108, 2, 16, device="meta"))),
    BadCall("v is a list", "v", TypeError, spoil("v", [1.0])),
    BadCall("an even number of rows", "distance_rows", ValueError, spoil("distance_rows", torch.zeros(138).int())),
    BadCall("rows of too few distances", "cu_seqlens", ValueError, spoil("distance_rows", torch.zeros(69).int())),
    BadCall("rows of reals", "distance_rows", TypeError, spoil("distance_rows", torch.zeros(139))),
    BadCall("rows past the tables", "distance_rows", ValueError, spoil("distance_rows", torch.full((139,), 16).int())),
    BadCall("a table of one head", "position_keys", ValueError, spoil("position_keys", torch.ones(16, 1, 16))),
    BadCall("tables of other rows", "position_queries", ValueError, spoil("position_queries", torch.ones(15, 2, 16))),
    BadCall("a bias of one head", "key_bias", ValueError, spoil("key_bias", torch.ones(108, 1))),
    BadCall("a bias of tokens", "key_bias", ValueError, spoil("key_bias", torch.ones(108))),
    BadCall("a bias of another type", "segment_bias", TypeError, spoil("segment_bias", torch.ones(108, 2).half())),
    BadCall("segments without a bias", "segments", ValueError, spoil("segments", torch.zeros(108).long())),
    BadCall("a bias without segments", "segments", ValueError, spoil("segment_bias", torch.ones(108, 2))),
    BadCall("a table without rows", "position_keys", ValueError, spoil("position_keys", torch.ones(0, 2, 16))),
    BadCall("boundaries of int64", "cu_seqlens", TypeError, spoil("cu_seqlens", torch.tensor([0, 70, 75, 108]))),
    BadCall(
        "boundaries past the end",
        "cu_seqlens",
        ValueError,
        spoil("cu_seqlens", torch.tensor([0, 70, 75, 109], dtype=torch.int32)),
    ),
    BadCall("a negative bound", "max_seqlen", ValueError, spoil("max_seqlen", -1)),
    BadCall("a bound of reals", "max_seqlen", TypeError, spoil("max_seqlen", 70.0)),
    BadCall("a mask of packed tokens", "mask", ValueError, spoil("mask", torch.ones(3, 70).bool())),
    BadCall("a mask that is a list", "mask", TypeError, spoil("mask", [True])),
    BadCall("a scale that is a text", "scale", TypeError, spoil("scale", "1")),
    BadCall("dropout above 1", "dropout_p", ValueError, spoil("dropout_p", 1.5)),
    BadCall("a seed of int32", "seed", TypeError, spoil("seed", torch.tensor([1], dtype=torch.int32))),
)


# ---- broken copies ---------------------------------------------------------------------------------------------------


def _without(name: str) -> Callable[..., Tensor]:
    def broken(**inputs: Any) -> Tensor:
        tables = sum(inputs[table] is not None for table in _TABLES)
        scale = (inputs["q"].shape[-1] * (1 + tables)) ** -0.5 if inputs["scale"] is None else inputs["scale"]
        return reference.disentangled_attention(**{**inputs, name: None, "scale": scale})

    return broken


def _keys_from_queries(**inputs: Any) -> Tensor:
    """Distances with the other sign."""
    return reference.disentangled_attention(**{**inputs, "distance_rows": inputs["distance_rows"].flip(0)})


def _one_segment(**inputs: Any) -> Tensor:
    segments = inputs["segments"]
    return reference.disentangled_attention(**{**inputs, "segments": None if segments is None else segments * 0})


def _swapped(**inputs: Any) -> Tensor:
    swapped = {"position_keys": inputs["position_queries"], "position_queries": inputs["position_keys"]}
    return reference.disentangled_attention(**{**inputs, **swapped})


def _scale_of_contents(**inputs: Any) -> Tensor:
    return reference.disentangled_attention(**{**inputs, "scale": inputs["q"].shape[-1] ** -0.5})


def _one_sequence(**inputs: Any) -> Tensor:
    bounds = inputs["cu_seqlens"][[0, 1, -1]]
    return reference.disentangled_attention(**{**inputs, "cu_seqlens": bounds})


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _triton_kernels() -> list[TritonKernel]:
    from fasttfm.kernels.disentangled_attention.triton_signatures import compile_signatures

    xlnet: dict[str, Any] = {"tables": (True, False), "biased": True}
    calls: list[tuple[int, str, int, dict[str, Any]]] = [
        (64, "bf16", 90, {}),
        (64, "bf16", 80, {}),
        (64, "fp16", 90, {"dropout": True}),
        (64, "bf16", 90, {"packed": False, "masked": True}),
        (64, "bf16", 90, xlnet),
        (64, "bf16", 80, xlnet),
        (64, "fp32", 90, {}),
        (128, "bf16", 90, {}),
    ]
    return [
        TritonKernel(**description) for *call, options in calls for description in compile_signatures(*call, **options)
    ]


def _bench(name: str, count: int, longest: int, heads: int, dtypes: tuple[torch.dtype, ...]) -> OpCase:
    sizes = {"heads": heads, "span": 256, "farthest": 512, "packed": False}
    return _case(name, (longest,) * count, 64, dtypes=dtypes, **sizes)


SPEC = OpSpec(
    name="disentangled_attention",
    function=disentangled_attention,
    reference=reference.disentangled_attention,
    inputs=_inputs,
    differentiable=("q", "k", "v", *_TABLES, *_BIASES),
    cases=CASES,
    property_cases=("typical", "mask", "xlnet"),
    torch_products=True,
    random_case=_random_case,
    bench_cases=(_bench("64x512", 64, 512, 12, (torch.bfloat16,)), _bench("64x128", 64, 128, 12, (torch.bfloat16,))),
    bench_cases_cpu=(_bench("8x128", 8, 128, 12, _SINGLE),),
    forward_cost=lambda case, dtype: _cost(case, dtype, tensors=4, products=2),
    backward_cost=lambda case, dtype: _cost(case, dtype, tensors=8, products=5),
    peers=torch_peers(_padded_attention),
    bad_calls=BAD_CALLS,
    mutants={
        "no position keys": _without("position_keys"),
        "no position queries": _without("position_queries"),
        "distances with the other sign": _keys_from_queries,
        "tables swapped": _swapped,
        "no key bias": _without("key_bias"),
        "one segment": _one_segment,
        "the scale of contents only": _scale_of_contents,
        "sequences joined": _one_sequence,
    },
    triton_kernels=_triton_kernels,
)
