"""embedding: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.embedding import reference
from fasttfm.ops import embedding
from fasttfm.testing.random_sizes import NORMALISED, random_lengths, random_scale, random_size, some_of
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, TritonKernel, draw, spoil

VOCABULARY = 30522


def cu_seqlens_of(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    sizes = case.sizes
    columns, wide = sizes["columns"], dtype == torch.float64
    table_dtype = dtype if wide else sizes.get("table_dtype") or dtype
    parameter_dtype = dtype if wide else sizes.get("parameter_dtype") or dtype
    lengths = sizes.get("lengths")
    shape = sizes["shape"] if lengths is None else (sum(lengths),)

    def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
        return draw(generator, *shape, dtype=dtype, device=device, scale=sizes.get("scale", 1.0))

    def indices(limit: int) -> Tensor:
        drawn = torch.randint(0, limit, shape, generator=generator)
        return drawn.to(sizes.get("index_dtype", torch.int64)).to(device)

    tables: Inputs = {"word_table": tensor(sizes["words"], columns, dtype=table_dtype) + sizes.get("offset", 0.0)}
    parameters: Inputs = {}
    inputs: Inputs = {"ids": indices(sizes.get("distinct", sizes["words"]))}
    for name in ("position", "segment"):
        if f"{name}s" in sizes:
            tables[f"{name}_table"] = tensor(sizes[f"{name}s"], columns, dtype=table_dtype)
            if f"{name}_ids" in sizes["present"]:
                inputs[f"{name}_ids"] = indices(sizes[f"{name}s"])
    for name in ("weight", "bias"):
        if name in sizes["present"]:
            parameters[name] = tensor(columns, dtype=parameter_dtype)
    if lengths is not None:
        inputs["cu_seqlens"] = cu_seqlens_of(lengths, device)
    if "seed" in sizes["present"]:
        inputs["seed"] = torch.tensor([0x123456789ABCDEF], device=device)
    if table_dtype != dtype:
        inputs["dtype"] = dtype
    # The harness rounds incoming gradients to the first floating type it meets: the output's.
    floating = {**tables, **parameters} if table_dtype == dtype else {**parameters, **tables}
    return {**floating, **inputs}


_ALL = ("weight", "bias", "segment_ids", "seed")
_TABLES = {"words": 11, "positions": 9, "segments": 2}


def _case(name: str, *shape: int, columns: int = 64, present: tuple[str, ...] = _ALL, **sizes: Any) -> OpCase:
    options: dict[str, Any] = {
        name: sizes.pop(name) for name in ("p", "eps", "padding_idx", "layer_norm") if name in sizes
    }
    return OpCase(name, {"shape": shape, "columns": columns, "present": present, **(_TABLES | sizes)}, options)


def _bench_case(name: str, *shape: int, columns: int, **sizes: Any) -> OpCase:
    present = ("weight", "bias", "segment_ids")
    return _case(
        name, *shape, columns=columns, present=present, words=VOCABULARY, positions=512, segments=2, p=0.1, **sizes
    )


CASES = (
    _case("typical", 3, 5, p=0.1),
    _case("no_dropout", 3, 5),
    _case("packed", lengths=(4, 0, 9, 1), p=0.25),
    _case("packed_given_positions", lengths=(4, 3), present=(*_ALL, "position_ids"), p=0.25),
    _case("given_positions", 2, 7, present=(*_ALL, "position_ids")),
    _case("odd", 3, 7, columns=33, p=0.5),
    _case("one_token", 1, 1, columns=100),
    _case("one_column", 1, 5, columns=1),
    _case("one_dimension", 6, columns=40),
    _case("three_dimensions", 2, 3, 4, columns=40, p=0.1),
    _case("no_tokens", 0, 5, columns=16, p=0.1),
    _case("packed_no_tokens", lengths=(0, 0), p=0.1),
    _case("one_word", 5, 9, distinct=1),
    _case("many_tokens", 33, 9, columns=48, words=300, p=0.1),
    _case("wide", 2, 3, columns=1543, p=0.1),
    _case("plain_layer_norm", 3, 5, present=("segment_ids",), layer_norm=True),
    _case("no_layer_norm", 3, 5, present=("segment_ids", "seed"), p=0.1),
    _case("segment_zero", 3, 5, present=("weight", "bias")),
    _case("segment_zero_of_many", 3, 5, present=("weight", "bias"), segments=7),
    _case("many_segments", 4, 6, segments=7, columns=40),
    _case("padding", 4, 6, padding_idx=3),
    _case("fp32_parameters", 3, 5, parameter_dtype=torch.float32, p=0.1),
    _case("fp32_tables", 3, 5, table_dtype=torch.float32, p=0.1),
    _case("int32", 3, 5, index_dtype=torch.int32),
    _case("large_mean", 4, 6, offset=100.0),
    _case("everything_dropped", 2, 3, p=1.0),
    OpCase("words_only", {"shape": (3, 5), "columns": 64, "present": (), "words": 11}),
)


def _random_case(source: random.Random) -> OpCase:
    packed = source.random() < 0.4
    lengths = random_lengths(source, longest=9)
    sizes: dict[str, Any] = {"words": random_size(source, 60), "positions": 9, "segments": source.randint(1, 3)}
    present = some_of(source, ("weight", "bias", "segment_ids", "position_ids"))
    if packed:
        sizes["lengths"] = lengths
    shape = () if packed else (source.randint(0, 6), source.randint(0, 9))
    return _case(
        "random",
        *shape,
        columns=NORMALISED - 1 + random_size(source),
        present=(*present, "seed"),
        p=source.choice((0.0, 0.1, 0.5)),
        layer_norm=source.random() < 0.7 or bool({"weight", "bias"} & set(present)),
        table_dtype=source.choice((torch.float32, None)),
        parameter_dtype=source.choice((torch.float32, None)),
        scale=random_scale(source),
        **sizes,
    )


def _tokens(case: OpCase) -> int:
    lengths = case.sizes.get("lengths")
    return int(torch.Size(case.sizes["shape"]).numel()) if lengths is None else sum(lengths)


def _table_size(case: OpCase, dtype: torch.dtype) -> int:
    return int(case.sizes.get("table_dtype", dtype).itemsize)


def _forward_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    """A row of the word table is read and a row of y written for every token; the other tables fit into the cache."""
    return Cost(bytes=_tokens(case) * (case.sizes["columns"] * (_table_size(case, dtype) + dtype.itemsize) + 8))


def _backward_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    """dy and the rows of the word table are read, and the whole gradient of the tables is written."""
    rows = sum(case.sizes.get(name, 0) for name in ("words", "positions", "segments"))
    gradient = rows * case.sizes["columns"] * _table_size(case, dtype)
    return Cost(bytes=_forward_cost(case, dtype).bytes + gradient)


def _torch_embedding(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """As users write it."""
    word, position, segment = (inputs[f"{name}_table"] for name in ("word", "position", "segment"))
    positions = torch.arange(inputs["ids"].shape[-1], device=word.device)
    functional = torch.nn.functional

    def call() -> Tensor:
        x = functional.embedding(inputs["ids"], word) + functional.embedding(positions, position)
        x = x + functional.embedding(inputs["segment_ids"], segment)
        x = functional.layer_norm(x, x.shape[-1:], inputs["weight"].to(x.dtype), inputs["bias"].to(x.dtype))
        return functional.dropout(x, options["p"]).to(inputs.get("dtype", x.dtype))

    return call


def _set(argument: str, index: tuple[int, ...], value: int) -> Callable[[Inputs, dict[str, Any]], None]:
    def change(inputs: Inputs, options: dict[str, Any]) -> None:
        inputs[argument] = inputs[argument].clone()
        inputs[argument][index] = value

    return change


def _pack(*boundaries: int) -> Callable[[Inputs, dict[str, Any]], None]:
    def change(inputs: Inputs, options: dict[str, Any]) -> None:
        inputs["ids"], inputs["segment_ids"] = inputs["ids"].reshape(-1), inputs["segment_ids"].reshape(-1)
        inputs["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32)

    return change


BAD_CALLS = (
    BadCall("ids is a list", "ids", TypeError, spoil("ids", [1])),
    BadCall("ids are floats", "ids", TypeError, spoil("ids", torch.ones(3, 5))),
    BadCall("ids has no dimension", "ids", ValueError, spoil("ids", torch.tensor(1))),
    BadCall("ids is too long", "ids", ValueError, spoil("ids", torch.zeros(3, 10, dtype=torch.int64))),
    BadCall("an id is negative", "ids", ValueError, _set("ids", (1, 2), -1)),
    BadCall("an id is too large", "ids", ValueError, _set("ids", (1, 2), 11)),
    BadCall("a segment is too large", "segment_ids", ValueError, _set("segment_ids", (0, 0), 2)),
    BadCall("segment_ids is short", "segment_ids", ValueError, spoil("segment_ids", torch.zeros(5, dtype=torch.int64))),
    BadCall("segment_ids without a table", "segment_ids", ValueError, spoil("segment_table", None)),
    BadCall("word_table is None", "word_table", TypeError, spoil("word_table", None)),
    BadCall("word_table is a vector", "word_table", ValueError, spoil("word_table", torch.ones(64))),
    BadCall("word_table has no row", "word_table", ValueError, spoil("word_table", torch.ones(0, 64))),
    BadCall("position_table is narrow", "position_table", ValueError, spoil("position_table", torch.ones(9, 63))),
    BadCall(
        "position_table of another type",
        "position_table",
        TypeError,
        spoil("position_table", torch.ones(9, 64).half()),
    ),
    BadCall(
        "segment_table elsewhere",
        "segment_table",
        ValueError,
        spoil("segment_table", torch.ones(2, 64, device="meta")),
    ),
    BadCall("weight too short", "weight", ValueError, spoil("weight", torch.ones(63))),
    BadCall("bias is a number", "bias", TypeError, spoil("bias", 1.0)),
    BadCall("double bias, single table", "word_table", TypeError, spoil("bias", torch.ones(64).double())),
    BadCall("eps is negative", "eps", ValueError, spoil("eps", -1.0)),
    BadCall("p above one", "p", ValueError, spoil("p", 1.5)),
    BadCall("p is text", "p", TypeError, spoil("p", "often")),
    BadCall("seed is a number", "seed", TypeError, spoil("seed", 3)),
    BadCall("seed of two numbers", "seed", ValueError, spoil("seed", torch.tensor([1, 2]))),
    BadCall("padding_idx is no row", "padding_idx", ValueError, spoil("padding_idx", 11)),
    BadCall("padding_idx is a float", "padding_idx", TypeError, spoil("padding_idx", 1.0)),
    BadCall("dtype of integers", "dtype", TypeError, spoil("dtype", torch.int32)),
    BadCall("dtype double, tables single", "dtype", TypeError, spoil("dtype", torch.float64)),
    BadCall(
        "cu_seqlens with two dimensions",
        "ids",
        ValueError,
        spoil("cu_seqlens", torch.tensor([0, 15], dtype=torch.int32)),
    ),
    BadCall("cu_seqlens of int64", "cu_seqlens", TypeError, spoil("cu_seqlens", torch.tensor([0, 15]))),
    BadCall("cu_seqlens ends early", "cu_seqlens", ValueError, _pack(0, 8, 14)),
    BadCall("cu_seqlens starts late", "cu_seqlens", ValueError, _pack(1, 8, 15)),
    BadCall("cu_seqlens falls", "cu_seqlens", ValueError, _pack(0, 8, 7, 15)),
    BadCall("a sequence has more tokens than positions", "cu_seqlens", ValueError, _pack(0, 10, 15)),
)


def _without_segments(segment_table: Tensor | None = None, **arguments: Any) -> Tensor:
    return reference.embedding(segment_table=None if segment_table is None else segment_table * 0, **arguments)


def _positions_run_on(ids: Tensor, cu_seqlens: Tensor | None = None, **arguments: Any) -> Tensor:
    if cu_seqlens is not None and arguments.get("position_ids") is None and arguments.get("position_table") is not None:
        arguments["position_ids"] = torch.arange(len(ids)) % len(arguments["position_table"])
    return reference.embedding(ids, cu_seqlens=cu_seqlens, **arguments)


def _unscaled_dropout(p: float = 0.0, **arguments: Any) -> Tensor:
    return reference.embedding(p=p, **arguments) * (1 - p)


class _LastTokenWins(torch.autograd.Function):
    """Right values, but of several tokens with the same id only one reaches the table's gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(table, ids)
        return table[ids]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        table, ids = ctx.saved_tensors
        return torch.zeros_like(table).index_put_((ids,), dx), None


def _repeats_lost(ids: Tensor, word_table: Tensor, **arguments: Any) -> Tensor:
    rows = _LastTokenWins.apply(word_table, ids.reshape(-1).long())
    arguments.pop("padding_idx", None)
    return reference.embedding(torch.arange(len(rows)).reshape(ids.shape), rows, **arguments)


def _triton_kernels() -> list[TritonKernel]:
    mixed = ("fp32", "bf16", "fp32")
    calls = [(columns, mixed) for columns in (128, 1024, 4096, 8192)]
    calls += [(1024, (element,) * 3) for element in ("bf16", "fp16", "fp32")]
    return [kernel for columns, types in calls for kernel in _signatures(columns, *types)]


def _signatures(columns: int, table: str, element: str, parameter: str) -> list[TritonKernel]:
    """Every kernel as its launcher compiles it for packed training; tables, y and parameters of these types."""
    from fasttfm.kernels.common.triton import sorted_sums, sum_parts
    from fasttfm.kernels.embedding import triton as kernels

    t, e, w, f, i, j = f"*{table}", f"*{element}", f"*{parameter}", "*fp32", "*i64", "*i32"
    tables = {"word_table": t, "position_table": t, "segment_table": t}
    indices = {"ids": i, "position_ids": t, "segment_ids": i, "cu_seqlens": j}
    sizes = dict.fromkeys(("N", "C", "V", "position_rows", "segment_rows", "sequences", "tokens_per_sequence"), "i32")
    loop = dict.fromkeys(("padding_idx", "groups", "members", "splits"), "i32")
    dropout = {"threshold": "i32", "scale": "fp32"}
    rows = {"keys": j, "row_indices": j, "terms": f}
    constants = {"LAYER_NORM": True, "HAS_WEIGHT": True, "DROPOUT": True, "POSITIONS": "own", "SEGMENTS": "given"}
    forward = {**tables, **indices, "weight": w, "bias": w, "seed": i, "y": e, "statistics": f, "errors": i, **sizes}
    backward = {
        "dy": e,
        **tables,
        **indices,
        "weight": w,
        "seed": i,
        "statistics": f,
        **rows,
        "dposition": t,
        "parts": f,
    }
    table_backward = {"dy": e, **tables, "weight": w, "seed": i, **rows, "order": i, "dtable": t, "parts": f}
    by_position = {"BY_POSITION": True, "FUSED_SEGMENTS": 2, "NO_ROW": 2**31 - 1}

    def kernel(function: Any, signature: dict[str, str], fixed: dict[str, Any], tile: dict[str, int]) -> TritonKernel:
        num_warps = tile.pop("num_warps")
        # Past 4096 columns the registers do not hold both the row and the sums over tokens.
        return TritonKernel(function, signature, {**constants, **fixed, **tile}, num_warps, allow_spills=columns > 4096)

    return [
        kernel(
            kernels._fwd_kernel,
            {**forward, "eps": "fp32", **dropout},
            {"PACKED": True, "HAS_BIAS": True},
            kernels._forward_tile(columns),
        ),
        kernel(
            kernels._rows_kernel,
            {**backward, **sizes, **loop, **dropout},
            {"PACKED": True, **by_position},
            kernels._rows_tile(columns),
        ),
        kernel(
            kernels._table_kernel,
            {**table_backward, "N": "i32", "C": "i32", "table_rows": "i32", **dropout},
            {"RUN": sorted_sums.RUN},
            kernels._table_tile(columns),
        ),
        TritonKernel(**sorted_sums.compile_signature(columns, table)),
        TritonKernel(**sum_parts.compile_signature(parameter, 2)),
    ]


SPEC = OpSpec(
    name="embedding",
    function=embedding,
    reference=reference.embedding,
    inputs=_inputs,
    differentiable=("word_table", "position_table", "segment_table", "weight", "bias"),
    cases=CASES,
    property_cases=("odd", "packed"),
    random_case=_random_case,
    bench_cases=(
        _bench_case("64x512x768", 64, 512, columns=768),
        _bench_case("64x512x1024", 64, 512, columns=1024),
        _bench_case("64x512x768 fp32 tables", 64, 512, columns=768, table_dtype=torch.float32),
        _bench_case("64x512x1024 fp32 tables", 64, 512, columns=1024, table_dtype=torch.float32),
    ),
    bench_cases_cpu=(
        _bench_case("4x512x768", 4, 512, columns=768),
        _bench_case("4x512x768 fp32 tables", 4, 512, columns=768, table_dtype=torch.float32),
    ),
    forward_cost=_forward_cost,
    backward_cost=_backward_cost,
    peers=torch_peers(_torch_embedding),
    bad_calls=BAD_CALLS,
    mutants={
        "without the segments": _without_segments,
        "positions run on over sequences": _positions_run_on,
        "dropout without its scale": _unscaled_dropout,
        "repeated ids lose gradient": _repeats_lost,
    },
    triton_kernels=_triton_kernels,
)
