"""pack and unpack: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.pack import reference
from fasttfm.ops import cu_seqlens_from_lengths, pack, unpack
from fasttfm.testing.random_sizes import random_lengths, random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, spoil, triton_kernels


def _pack_inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    lengths, longest, token = (case.sizes[name] for name in ("lengths", "longest", "token"))
    x = draw(generator, len(lengths), longest, *token, dtype=dtype, device=device)
    if case.sizes.get("transposed"):  # [S, B, ...] seen as [B, S, ...]
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return {"x": x, "cu_seqlens": cu_seqlens_from_lengths(lengths, device=device)}


def _unpack_inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    packed = draw(generator, case.sizes["total"], *case.sizes["token"], dtype=dtype, device=device)
    return {"packed": packed, "cu_seqlens": cu_seqlens_from_lengths(case.sizes["lengths"], device=device)}


def _case(
    name: str, *lengths: int, longest: int, token: tuple[int, ...] = (24,), spare: int = 0, **sizes: Any
) -> OpCase:
    total = sum(lengths) + spare
    sizes = {"lengths": lengths, "longest": longest, "token": token, "total": total, **sizes}
    return OpCase(name, sizes, {"total": total})


def _for_unpack(case: OpCase) -> OpCase:
    return replace(case, options={"max_seqlen": case.sizes["longest"]})


CASES = (
    _case("typical", 3, 7, 1, longest=7),
    _case("empty_sequences", 0, 4, 0, 5, 0, longest=6),
    _case("full", 5, 5, 5, longest=5),
    _case("no_token", 0, 0, longest=4),
    _case("no_sequence", longest=4),
    _case("no_room", 0, 0, longest=0),
    _case("one_token", 1, longest=1),
    _case("spare_rows", 3, 1, 2, longest=6, spare=4),
    _case("scalars", 3, 2, longest=5, token=()),
    _case("matrices", 3, 2, longest=5, token=(3, 5)),
    _case("wide", 3, 0, 2, longest=4, token=(1543,)),
    _case("long", 130, 1, 77, longest=140, token=(3,)),
    _case("transposed", 3, 2, longest=5, transposed=True),
)


def _random_case(source: random.Random) -> OpCase:
    lengths = random_lengths(source)
    longest = max(lengths, default=0) + source.randint(0, 3)
    spare = source.randint(0, min(3, longest * len(lengths) - sum(lengths)))
    token = tuple(random_size(source, 64) for _ in range(source.randint(0, 2)))
    return _case("random", *lengths, longest=longest, token=token, spare=spare)


def _random_unpack(source: random.Random) -> OpCase:
    return _for_unpack(_random_case(source))


def _bench_case(name: str, batch: int, longest: int, columns: int) -> OpCase:
    """Lengths spread evenly from an eighth to all of ``longest``."""
    lengths = [longest // 8 + (longest - longest // 8) * i // (batch - 1) for i in range(batch)]
    return _case(name, *lengths, longest=longest, token=(columns,))


def _pack_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    return Cost(bytes=2 * sum(case.sizes["lengths"]) * torch.Size(case.sizes["token"]).numel() * dtype.itemsize)


def _unpack_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    rows = sum(case.sizes["lengths"]) + len(case.sizes["lengths"]) * case.sizes["longest"]
    return Cost(bytes=rows * torch.Size(case.sizes["token"]).numel() * dtype.itemsize)


def _indices(inputs: Inputs, longest: int) -> Tensor:
    """The indices of packed tokens in the padded batch, as users compute them once per step."""
    present = torch.arange(longest, device=inputs["cu_seqlens"].device) < inputs["cu_seqlens"].diff()[:, None]
    return present.flatten().nonzero().squeeze(1)


def _torch_pack(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    indices = _indices(inputs, inputs["x"].shape[1])
    return lambda: inputs["x"].flatten(0, 1).index_select(0, indices)


def _torch_unpack(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    packed, longest = inputs["packed"], options["max_seqlen"]
    indices, batch = _indices(inputs, longest), len(inputs["cu_seqlens"]) - 1

    def call() -> Tensor:
        x = packed.new_zeros(batch * longest, *packed.shape[1:])
        return x.index_copy(0, indices, packed).unflatten(0, (batch, longest))

    return call


def _boundaries(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


_BAD_BOUNDARIES = (
    BadCall("cu_seqlens is a list", "cu_seqlens", TypeError, spoil("cu_seqlens", [0, 3, 10, 11])),
    BadCall("cu_seqlens of int64", "cu_seqlens", TypeError, spoil("cu_seqlens", torch.tensor([0, 3, 10, 11]))),
    BadCall(
        "cu_seqlens of two dimensions", "cu_seqlens", ValueError, spoil("cu_seqlens", _boundaries(0, 3, 10, 11)[None])
    ),
    BadCall("cu_seqlens is empty", "cu_seqlens", ValueError, spoil("cu_seqlens", _boundaries())),
    BadCall("cu_seqlens starts late", "cu_seqlens", ValueError, spoil("cu_seqlens", _boundaries(1, 3, 10, 11))),
    BadCall("cu_seqlens falls", "cu_seqlens", ValueError, spoil("cu_seqlens", _boundaries(0, 7, 5, 11))),
    BadCall("cu_seqlens ends late", "cu_seqlens", ValueError, spoil("cu_seqlens", _boundaries(0, 5, 10, 12))),
    BadCall("a sequence is too long", "cu_seqlens", ValueError, spoil("cu_seqlens", _boundaries(0, 8, 10, 11))),
    BadCall(
        "cu_seqlens elsewhere", "cu_seqlens", ValueError, spoil("cu_seqlens", _boundaries(0, 3, 10, 11).to("meta"))
    ),
)
_BAD_PACKS = (
    *_BAD_BOUNDARIES,
    BadCall("x is a list", "x", TypeError, spoil("x", [[1.0]])),
    BadCall("x of one dimension", "x", ValueError, spoil("x", torch.ones(3))),
    BadCall("neither cu_seqlens nor lengths", "cu_seqlens", ValueError, spoil("cu_seqlens", None)),
    BadCall("both cu_seqlens and lengths", "cu_seqlens", ValueError, spoil("lengths", [3, 7, 1])),
    BadCall("one sequence too few", "cu_seqlens", ValueError, spoil("cu_seqlens", _boundaries(0, 3, 10))),
    BadCall("total is a float", "total", TypeError, spoil("total", 11.0)),
    BadCall("total is negative", "total", ValueError, spoil("total", -1)),
    BadCall("total is more than there is", "total", ValueError, spoil("total", 22)),
)
_BAD_UNPACKS = (
    *_BAD_BOUNDARIES,
    BadCall("packed is a list", "packed", TypeError, spoil("packed", [1.0])),
    BadCall("packed has no dimension", "packed", ValueError, spoil("packed", torch.tensor(1.0))),
    BadCall("max_seqlen is a float", "max_seqlen", TypeError, spoil("max_seqlen", 7.0)),
    BadCall("max_seqlen is negative", "max_seqlen", ValueError, spoil("max_seqlen", -1)),
    BadCall("max_seqlen is too short", "cu_seqlens", ValueError, spoil("max_seqlen", 6)),
)


def _pack_one_late(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    return reference.pack(x.roll(-1, dims=1), cu_seqlens, total)


def _pack_from_the_right(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    shifted = [row.roll(int(length), dims=0) for row, length in zip(x, cu_seqlens.diff(), strict=True)]
    return reference.pack(torch.stack(shifted) if shifted else x, cu_seqlens, total)


def _unpack_keeping_the_next(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """The padding shows the tokens that follow."""
    rows = (cu_seqlens[:-1, None] + torch.arange(max_seqlen)).clamp(0, max(0, len(packed) - 1))
    return packed[rows] if len(packed) > 0 else reference.unpack(packed, cu_seqlens, max_seqlen)


_BENCH = (_bench_case("64x512x1024", 64, 512, 1024), _bench_case("64x512x768", 64, 512, 768))
_BENCH_CPU = (_bench_case("4x512x768", 4, 512, 768),)

SPEC = OpSpec(
    name="pack",
    function=pack,
    reference=reference.pack,
    inputs=_pack_inputs,
    differentiable=("x",),
    cases=CASES,
    random_case=_random_case,
    bench_cases=_BENCH,
    bench_cases_cpu=_BENCH_CPU,
    forward_cost=_pack_cost,
    backward_cost=_unpack_cost,
    peers=torch_peers(_torch_pack),
    bad_calls=_BAD_PACKS,
    mutants={"one token late": _pack_one_late, "counted from the right": _pack_from_the_right},
    triton_kernels=triton_kernels("pack", (1, "i64"), (768, "bf16"), (1024, "fp32"), (4096, "bf16")),
)
UNPACK_SPEC = OpSpec(
    name="unpack",
    function=unpack,
    reference=reference.unpack,
    inputs=_unpack_inputs,
    differentiable=("packed",),
    cases=tuple(_for_unpack(case) for case in CASES),
    random_case=_random_unpack,
    bench_cases=tuple(_for_unpack(case) for case in _BENCH),
    bench_cases_cpu=tuple(_for_unpack(case) for case in _BENCH_CPU),
    forward_cost=_unpack_cost,
    backward_cost=_pack_cost,
    peers=torch_peers(_torch_unpack),
    bad_calls=_BAD_UNPACKS,
    mutants={"padding keeps what follows": _unpack_keeping_the_next},
)
