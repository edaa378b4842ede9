"""maxsim: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.maxsim import reference
from fasttfm.ops import cu_seqlens_from_lengths, maxsim
from fasttfm.testing.random_sizes import random_scale, random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, op_case, spoil, triton_kernels

# How sequences are given: "dense" ones are as long as the first, others have the length of each.
_LAYOUTS = ("dense", "lengths", "packed")


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    columns, scale = case.sizes["columns"], case.sizes.get("scale", 1.0)
    inputs: Inputs = {}
    for side_name, plural in (("query", "queries"), ("document", "documents")):
        lengths, layout = case.sizes[plural], case.sizes[f"{side_name}_layout"]
        shape = (sum(lengths),) if layout == "packed" else (len(lengths), max(lengths, default=0))
        inputs[plural] = draw(generator, *shape, columns, dtype=dtype, device=device, scale=scale * columns**-0.25)
        inputs |= {f"{side_name}_lengths": None, f"{side_name}_cu_seqlens": None, f"{side_name}_mask": None}
        if layout == "packed":
            inputs[f"{side_name}_cu_seqlens"] = cu_seqlens_from_lengths(lengths, device=device)
        elif layout == "lengths":
            inputs[f"{side_name}_lengths"] = torch.tensor(lengths, dtype=torch.int64, device=device)
        share = case.sizes.get(f"{side_name}_share")  # of the tokens that count; the first two of a sequence always do
        if share is not None:
            starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
            mask = torch.rand(shape, generator=generator) < share
            mask[torch.cat([starts, starts + 1]) if layout == "packed" else (..., slice(2))] = True
            inputs[f"{side_name}_mask"] = mask.to(device)
    return inputs


def _case(name: str, queries: Sequence[int], documents: Sequence[int], columns: int = 24, **sizes: Any) -> OpCase:
    pairs, layout = sizes.pop("pairs", False), sizes.pop("layout", "packed")
    layouts = {"query_layout": layout, "document_layout": layout}
    all_sizes = {"queries": tuple(queries), "documents": tuple(documents), "columns": columns, **layouts, **sizes}
    return op_case(name, {"pairs": pairs}, **all_sizes)


_SINGLE = (torch.float32,)
CASES = (
    _case("typical", (5, 3, 7), (9, 4, 11, 6)),
    _case("dense", (6, 6), (9, 9, 9), layout="dense", dtypes=_SINGLE),
    _case("lengths_and_masks", (5, 6, 2), (9, 4, 2), layout="lengths", query_share=0.7, document_share=0.6),
    _case("packed_masks", (6, 3), (9, 4, 40), query_share=0.7, document_share=0.6),
    _case("pairs", (5, 3), (9, 4, 11, 6), pairs=True),
    _case("padded_pairs", (5, 40, 2), (9, 4, 35), pairs=True, layout="lengths", query_share=0.7, dtypes=_SINGLE),
    _case("long", (140, 9), (150, 70), 40, interpret=False),
    _case("wide", (5, 3), (8, 3), 300),
    _case("empty_query", (0, 3, 0), (4, 2), dtypes=_SINGLE),
    _case("no_document", (4, 3), (), interpret=False, dtypes=_SINGLE),
    _case("no_query", (), (4, 3), interpret=False, dtypes=_SINGLE),
)


def _random_case(source: random.Random) -> OpCase:
    count, pairs = source.randint(1, 5), source.random() < 0.3
    queries = [1 + random_size(source, 40) for _ in range(count)]
    # A NaN changes the only token's gradient where that does not depend on the number in its place.
    documents = [
        1 + random_size(source, 90) for _ in range(count * source.randint(1, 2) if pairs else source.randint(1, 6))
    ]
    sizes: dict[str, Any] = {f"{side}_layout": source.choice(_LAYOUTS) for side in ("query", "document")}
    sizes |= {f"{side}_share": source.choice((None, 0.7)) for side in ("query", "document")}
    return _case(
        "random", queries, documents, random_size(source, 160), pairs=pairs, scale=random_scale(source), **sizes
    )


# ---- costs and peers -------------------------------------------------------------------------------------------------


def _cost(case: OpCase, dtype: torch.dtype, products: bool) -> Cost:
    queries, documents, columns = sum(case.sizes["queries"]), sum(case.sizes["documents"]), case.sizes["columns"]
    vectors = (queries + documents) * columns * dtype.itemsize
    if products:
        return Cost(bytes=vectors, flops=2.0 * queries * documents * columns)
    return Cost(bytes=2 * vectors)


def _torch_scores(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """As ColBERT and PyLate write it, for sequences of one length."""
    queries, documents = inputs["queries"], inputs["documents"]
    return lambda: torch.einsum("bqd,ckd->bcqk", queries, documents).max(dim=-1).values.sum(dim=-1)


BAD_CALLS = (
    BadCall("queries of integers", "queries", TypeError, spoil("queries", torch.ones(15, 24).long())),
    BadCall("padded queries next to cu_seqlens", "queries", ValueError, spoil("queries", torch.ones(3, 5, 24))),
    BadCall("packed queries without cu_seqlens", "queries", ValueError, spoil("query_cu_seqlens", None)),
    BadCall("documents of other columns", "documents", ValueError, spoil("documents", torch.ones(30, 23))),
    BadCall("documents of another type", "documents", TypeError, spoil("documents", torch.ones(30, 24).half())),
    BadCall("documents elsewhere", "documents", ValueError, spoil("documents", torch.ones(30, 24, device="meta"))),
    BadCall("documents are a list", "documents", TypeError, spoil("documents", [1.0])),
    BadCall(
        "boundaries of int64",
        "document_cu_seqlens",
        TypeError,
        spoil("document_cu_seqlens", torch.tensor([0, 9, 13, 24, 30])),
    ),
    BadCall(
        "boundaries past the end",
        "query_cu_seqlens",
        ValueError,
        spoil("query_cu_seqlens", torch.tensor([0, 16], dtype=torch.int32)),
    ),
    BadCall("lengths of packed tokens", "query_lengths", ValueError, spoil("query_lengths", torch.tensor([5, 3, 7]))),
    BadCall("mask of another shape", "document_mask", ValueError, spoil("document_mask", torch.ones(29).bool())),
    BadCall("mask of reals", "query_mask", TypeError, spoil("query_mask", torch.ones(15))),
    BadCall("mask is a list", "query_mask", TypeError, spoil("query_mask", [True])),
    BadCall("pairs is a number", "pairs", TypeError, spoil("pairs", 1)),
    BadCall("four documents for three queries", "documents", ValueError, spoil("pairs", True)),
)


# ---- broken copies ---------------------------------------------------------------------------------------------------


def _all_tokens_count(**inputs: Any) -> Tensor:
    return reference.maxsim(**{**inputs, "query_mask": None, "document_mask": None})


def _padding_counts(**inputs: Any) -> Tensor:
    return reference.maxsim(**{**inputs, "query_lengths": None, "document_lengths": None})


def _mean_of_maxima(**inputs: Any) -> Tensor:
    return reference.maxsim(**inputs) / inputs["queries"].shape[-2]


def _documents_first(**inputs: Any) -> Tensor:
    """The maximum over the query's tokens, summed over the document's."""
    names = {"queries": "documents"} | {f"query_{x}": f"document_{x}" for x in ("lengths", "cu_seqlens", "mask")}
    swapped = {name: inputs[names[name]] for name in names} | {names[name]: inputs[name] for name in names}
    return reference.maxsim(**swapped, pairs=inputs["pairs"]).t()


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _bench(queries: int, documents: int, dtypes: tuple[torch.dtype, ...]) -> OpCase:
    """ColBERT's sizes: 32 tokens of a query, 180 of a document, 128 columns."""
    name = f"{queries}x32_{documents}x180"
    return _case(name, (32,) * queries, (180,) * documents, 128, layout="dense", dtypes=dtypes)


SPEC = OpSpec(
    name="maxsim",
    function=maxsim,
    reference=reference.maxsim,
    inputs=_inputs,
    differentiable=("queries", "documents"),
    cases=CASES,
    property_cases=("typical", "lengths_and_masks"),
    torch_products=True,
    infinity_masks=("queries", "documents"),  # a token whose products are -inf is no maximum
    random_case=_random_case,
    bench_cases=tuple(_bench(*sizes, (torch.bfloat16,)) for sizes in ((32, 64), (128, 256), (512, 512))),
    bench_cases_cpu=(_bench(8, 16, _SINGLE),),
    forward_cost=lambda case, dtype: _cost(case, dtype, products=True),
    backward_cost=lambda case, dtype: _cost(case, dtype, products=False),
    peers=torch_peers(_torch_scores),
    bad_calls=BAD_CALLS,
    mutants={
        "all tokens count": _all_tokens_count,
        "padding counts": _padding_counts,
        "the mean of the maxima": _mean_of_maxima,
        "documents first": _documents_first,
    },
    triton_kernels=triton_kernels("maxsim", (128, "bf16"), (768, "bf16"), (128, "fp32")),
)
