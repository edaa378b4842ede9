"""Applies the rules for kernels (kernel_rules.py) to all kernels, and shows that each rule can fail."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import kernel_rules as rules
import pytest

ROOT = Path(__file__).parent.parent

# Products that fit into 32 bits, or whose index has 64 bits, with the reason.
NARROW_PRODUCTS = {
    ("kernels/attention/triton_tiles.py", "tl.arange(0, BLOCK)[:, None] * stride"): "the launcher sets WIDE, with"
    " which the stride has 64 bits, if a tile of 128 rows spans 2^31 elements",
    **{
        ("kernels/embedding/triton.py", f"{name}[:, None] * C"): "the callers' indices are int64"
        for name in ("word", "position", "segment")
    },
    ("kernels/embedding/triton.py", "rows[:, None] * C"): "rows are loaded from order, which torch.sort has in int64",
    ("kernels/vocabulary/triton_tail.py", "token * weight_stride"): "fewer than 8 rows at the end of a vocabulary",
}
NARROW_CPP_PRODUCTS = {
    **{
        (
            "kernels/dropout_add_layer_norm/cuda_backward_tiles.cuh",
            f"{name} * columns",
        ): "rows of a tile in shared memory"
        for name in ("present", "adjacent")
    },
    ("kernels/few_rows/layers_cached_attention.cuh", "i * pitch"): "results of warps and blocks in shared memory",
}
# The second or third dimension of a grid, which has up to 65,535 programs.
SHORT_GRIDS = {
    **{
        (f"kernels/{op}/triton.py", extent): "512 columns each: more than 33 million columns"
        for op in ("bias_gelu", "gated_activation")
        for extent in ("cdiv(columns, tile['BLOCK_C'])", "stripes")
    },
    ("kernels/column_sum/triton.py", "parts"): "a few programs per SM",
    ("kernels/column_sum/triton.py", "1"): "one",
    ("kernels/common/triton/sorted_sums.py", "cdiv(columns, block_c)"): "columns of an embedding table",
    ("kernels/common/triton/sum_parts.py", "count"): "up to three results",
    ("kernels/decode_attention/triton.py", "key_heads"): "heads of a model",
    ("kernels/decode_attention/triton.py", "splits"): "longer splits where there would be more: _MOST_SPLITS",
    ("kernels/embedding/triton.py", "cdiv(columns, tile['BLOCK_C'])"): "columns of an embedding table",
    ("kernels/maxsim/triton.py", "cdiv(columns, tile['BLOCK_D'])"): "columns of an embedding",
    ("kernels/vocabulary/triton_pick_rows.py", "cdiv(rows.shape[1], block_c)"): "columns of a hidden state",
    ("kernels/vocabulary/triton_pick_rows.py", "cdiv(out.shape[1], block_c)"): "columns of a hidden state",
}


def kernels(*suffixes: str) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "kernels").rglob("*")):
        if path.suffix in suffixes:
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


# ---- the kernels -----------------------------------------------------------------------------------------------------


def test_boundaries_are_read_by_one_function_per_language() -> None:
    found = [each for path, text in kernels(".h", ".cuh", ".cu", ".cpp") for each in rules.boundary_reads(path, text)]
    found += [each for path, text in kernels(".py") for each in rules.triton_boundary_reads(path, text)]
    assert found == []


def test_offsets_have_64_bits() -> None:
    found = [each for path, text in kernels(".py") for each in rules.narrow_products(path, text, NARROW_PRODUCTS)]
    found += [each for path, text in kernels(".h") for each in rules.narrow_fields(path, text)]
    for path, text in kernels(".cu", ".cuh"):
        found += rules.narrow_cpp_products(path, text, NARROW_CPP_PRODUCTS)
    assert found == []


def test_grids_grow_along_x() -> None:
    assert [each for path, text in kernels(".py") for each in rules.long_grids(path, text, SHORT_GRIDS)] == []


def test_every_exception_is_needed() -> None:
    python, cuda = dict(kernels(".py")), dict(kernels(".cu", ".cuh"))

    def found(rule: object, texts: dict[str, str]) -> str:
        return "\n".join(each for path, text in texts.items() for each in rule(path, text, {}))  # type: ignore[operator]

    for rule, texts, exceptions in (
        (rules.narrow_products, python, NARROW_PRODUCTS),
        (rules.narrow_cpp_products, cuda, NARROW_CPP_PRODUCTS),
        (rules.long_grids, python, SHORT_GRIDS),
    ):
        violations = found(rule, texts).splitlines()
        for path, text in exceptions:
            assert any(each.startswith(path) and each.endswith(text) for each in violations), (path, text)


# ---- each rule can fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reads"),
    [
        ("  const int begin = p.cu_seqlens[blockIdx.z];", True),
        ("  const int32_t *q = p.cu_seqlens + index;", True),
        ("  const int32_t* starts = p.cu_seqlens;", True),
        ("  const int end = bounds[sequence + 1];", True),
        ("  if (*p.cu_seqlens != 0) return;", True),
        ("  const int32_t* cu_seqlens;  // cu_seqlens[i]: the first row of sequence i", False),
        ("  const int32_t *cu_seqlens, *cu_seqlens_k;", False),
        ("  const Span span = packed_span(p.cu_seqlens, sequence, p.queries, p.max_seqlen);", False),
        ("  attention.cu_seqlens = attention.cu_seqlens_k = call.cu_seqlens;", False),
    ],
)
def test_a_read_of_boundaries_is_found(line: str, reads: bool) -> None:
    assert bool(rules.boundary_reads("kernels/op/cuda.cu", line)) == reads
    assert rules.boundary_reads("kernels/common/packed.h", line) == []


def test_a_load_of_boundaries_is_found() -> None:
    kernel = dedent(
        """
        @triton.jit
        def _kernel(x, cu_seqlens, bounds, LAYOUT: tl.constexpr):
            first = {load}
            if LAYOUT == "lengths":
                first = tl.load(bounds)
        """
    )
    path = "kernels/op/triton.py"
    assert len(rules.triton_boundary_reads(path, kernel.format(load="tl.load(cu_seqlens + 1)"))) == 1
    assert len(rules.triton_boundary_reads(path, kernel.format(load="tl.load(bounds, mask=x)"))) == 1
    assert rules.triton_boundary_reads(path, kernel.format(load="packed_first(cu_seqlens, 1, 2)")) == []


@pytest.mark.parametrize(
    ("lines", "narrow"),
    [
        ("offsets = tl.arange(0, 16)[:, None] * stride", True),
        ("place = head * keys_stride_h", True),
        ("place = row * C", True),
        ("place = head.to(tl.int64) * keys_stride_h", False),
        ("wide = head.to(tl.int64)\n    more = wide + 1\n    place = more * keys_stride_h", False),
        ("for row in range(head.to(tl.int64), 8):\n        place = row * C", False),
        ("place = stride * 8", False),
    ],
)
def test_a_narrow_product_is_found(lines: str, narrow: bool) -> None:
    kernel = f"@triton.jit\ndef _kernel(head, row, stride, keys_stride_h, C):\n    {lines}\n"
    found = rules.narrow_products("kernels/op/triton.py", kernel, {})
    assert bool(found) == narrow
    assert rules.narrow_products("kernels/op/triton.py", kernel.replace("@triton.jit\n", ""), {}) == []


def test_a_narrow_product_of_cuda_is_found() -> None:
    narrow = "const int columns = static_cast<int>(p.columns);\nx += row * columns;\n"
    path = "kernels/op/cuda.cu"
    assert rules.narrow_cpp_products(path, narrow, {}) == [f"{path}: a 32-bit product: row * columns"]
    assert rules.narrow_cpp_products(path, "int64_t row = 0;\n" + narrow, {}) == []
    assert rules.narrow_cpp_products(path, narrow, {(path, "row * columns"): "why"}) == []
    assert rules.narrow_fields("kernels/op/op.h", "struct P {\n  int x_stride;\n  int64_t columns;\n};") == [
        "kernels/op/op.h: x_stride is int, expected int64_t"
    ]


def test_a_long_grid_is_found() -> None:
    path = "kernels/op/triton.py"
    assert rules.long_grids(path, "_kernel[(cdiv(tokens, 4),)](x)", {}) == []
    assert len(rules.long_grids(path, "_kernel[(batch, cdiv(tokens, 4))](x)", {})) == 1
    assert len(rules.long_grids(path, "grid = (batch, tokens)\n_kernel[grid](x)", {})) == 1
    assert rules.long_grids(path, "_kernel[(batch, heads)](x)", {(path, "heads"): "few"}) == []
