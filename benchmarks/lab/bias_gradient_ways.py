"""Times the ways to get a linear layer's three gradients: ``python benchmarks/lab/bias_gradient_ways.py`` on a GPU.

The bias gradient is a sum over the rows of dy, a pass of its own beside the two matrix products. It can run after them,
on a second stream beside one of them (on all multiprocessors, or on a few with the product kept off those), or inside
the weight's product, by the vendor library's epilogue, which torch does not offer: it is called through ctypes here.
They take turns as CUDA graphs; the table gives milliseconds, the ratio to the bare products and db's error.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fasttfm import _native

sys.path.insert(0, str(Path(__file__).parent))
from mlp_ways import measure

TOKENS = 32768
WORKSPACE = 64 << 20


def column_sum(x: Tensor, parts: int) -> Tensor:
    """The op's kernel with the rows cut into a given number of parts: strips * parts blocks."""
    total = torch.empty(x.shape[1], dtype=x.dtype, device=x.device)
    workspace = torch.empty(parts * x.shape[1], device=x.device)
    code = _native.DTYPE_CODES[x.dtype]
    _native.core().column_sum_cuda(
        x=x.data_ptr(),
        sum=total.data_ptr(),
        workspace=workspace.data_ptr(),
        rows=x.shape[0],
        columns=x.shape[1],
        x_stride=x.stride(0),
        dtype=code,
        sum_dtype=code,
        parts=parts,
        device=x.device.index,
        stream=_native.stream(x),
    )
    return total


class VendorProduct:
    """dy^T x, [O, C], by the vendor's library; with ``bias_gradient`` its epilogue also adds up dy's rows."""

    # Names and codes of cublasLt.h.
    COMPUTE_32F, R_32F, R_16BF = 68, 0, 14
    TRANSB, EPILOGUE, BIAS_POINTER, MAX_WORKSPACE = 4, 7, 8, 1
    BGRADB = 512

    class Heuristic(ctypes.Structure):
        _fields_ = (
            ("algorithm", ctypes.c_uint64 * 8),
            ("workspace", ctypes.c_size_t),
            ("state", ctypes.c_int),
            ("waves", ctypes.c_float),
            ("reserved", ctypes.c_int * 4),
        )

    def __init__(self, dy: Tensor, x: Tensor, bias_gradient: bool) -> None:
        self.library = ctypes.CDLL(loaded_library("libcublasLt.so"))
        self.dy, self.x = dy, x
        (tokens, outputs), columns = dy.shape, x.shape[1]
        self.dweight = torch.empty(outputs, columns, dtype=x.dtype, device=x.device)
        self.dbias = torch.empty(outputs, dtype=x.dtype, device=x.device)
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        self.handle, self.operation, preference = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.call("cublasLtMatmulDescCreate", ctypes.byref(self.operation), self.COMPUTE_32F, self.R_32F)
        self.set(self.TRANSB, ctypes.c_int32(1))
        if bias_gradient:
            self.set(self.EPILOGUE, ctypes.c_int32(self.BGRADB))
            self.set(self.BIAS_POINTER, ctypes.c_void_p(self.dbias.data_ptr()))
        # Column by column, as the library reads matrices, x is [C, T], dy [O, T] and their product [C, O].
        self.layouts = [
            self.layout(columns, tokens),
            self.layout(outputs, tokens),
            self.layout(columns, outputs),
        ]
        self.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_size_t(WORKSPACE)
        self.call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            self.MAX_WORKSPACE,
            ctypes.byref(size),
            ctypes.sizeof(size),
        )
        found, self.choices = ctypes.c_int(), (self.Heuristic * 8)()
        a, b, d = self.layouts
        self.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle,
            self.operation,
            a,
            b,
            d,
            d,
            preference,
            len(self.choices),
            self.choices,
            ctypes.byref(found),
        )
        if found.value == 0:
            raise RuntimeError("the library has no algorithm for this product")
        times = measure({str(index): lambda index=index: self.run(index) for index in range(found.value)})
        self.best = int(min(times, key=times.__getitem__))

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} gives {status}")

    def set(self, attribute: int, value: ctypes._SimpleCData) -> None:  # type: ignore[type-arg]
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self.call("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(value), size)

    def layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        self.call("cublasLtMatrixLayoutCreate", ctypes.byref(found), self.R_16BF, *sizes)
        return found

    def run(self, choice: int) -> None:
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        a, b, d = self.layouts
        out = ctypes.c_void_p(self.dweight.data_ptr())
        self.call(
            "cublasLtMatmul",
            self.handle,
            self.operation,
            ctypes.byref(one),
            ctypes.c_void_p(self.x.data_ptr()),
            a,
            ctypes.c_void_p(self.dy.data_ptr()),
            b,
            ctypes.byref(zero),
            out,
            d,
            out,
            d,
            ctypes.byref(self.choices[choice].algorithm),
            ctypes.c_void_p(self.workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.run(self.best)
        return self.dweight, self.dbias


def loaded_library(name: str) -> str:
    """The path of a library that this process has already loaded, as torch has its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            return line.split()[-1]
    raise RuntimeError(f"{name} is not loaded")


def beside(first: Callable[[], object], second: Callable[[], Tensor], stream: torch.cuda.Stream) -> Tensor:
    """``second`` on another stream while ``first`` runs."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        found = second()
    first()
    current.wait_stream(stream)
    return found


def compare(outputs: int, columns: int) -> None:
    torch.manual_seed(0)
    dy, x, weight = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((TOKENS, outputs), (TOKENS, columns), (outputs, columns))
    )
    torch.mm(dy.t(), x)
    strips, multiprocessors = -(-outputs // 256), torch.cuda.get_device_properties(dy.device).multi_processor_count
    whole = 4 * multiprocessors // strips
    stream = torch.cuda.Stream()
    product, fused = VendorProduct(dy, x, False), VendorProduct(dy, x, True)

    def dx() -> Tensor:
        return torch.mm(dy, weight)

    def dweight() -> Tensor:
        return torch.mm(dy.t(), x)

    def on_few(count: int) -> Tensor:
        """The sum on ``count`` multiprocessors, dx's product told to keep off as many."""
        torch._C._set_sm_carveout_experimental(count)
        try:
            found = beside(dx, lambda: column_sum(dy, max(1, 4 * count // strips)), stream)
        finally:
            torch._C._set_sm_carveout_experimental(None)
        dweight()
        return found

    ways: dict[str, Callable[[], object]] = {
        "bare products": lambda: (dx(), dweight()),
        "bare, library called directly": lambda: (dx(), product()),
        "sum alone": lambda: column_sum(dy, whole),
        "sum after": lambda: (dx(), dweight(), column_sum(dy, whole))[2],
        "sum beside dx": lambda: (beside(dx, lambda: column_sum(dy, whole), stream), dweight())[0],
        "sum beside dweight": lambda: (beside(dweight, lambda: column_sum(dy, whole), stream), dx())[0],
        "epilogue of dweight": lambda: (dx(), fused()[1])[1],
    }
    for parts in (1, 2, 4, 8):
        ways[f"sum in {parts * strips} blocks beside dx"] = lambda parts=parts: (
            beside(dx, lambda: column_sum(dy, parts), stream),
            dweight(),
        )[0]
    for count in (8, 16, 24):
        ways[f"sum on {count} multiprocessors beside dx"] = lambda count=count: on_few(count)
    times = measure(ways)
    exact = dy.double().sum(dim=0)
    print(f"\n{TOKENS} x {columns} -> {outputs}")
    for name, milliseconds in times.items():
        found = None if name.startswith("bare") else ways[name]()
        error = "" if found is None else f"{((found.double() - exact).abs().max() / exact.abs().max()).item():.1e}"
        print(f"  {name:<40} {milliseconds:7.4f} ms  {milliseconds / times['bare products']:5.3f} of bare  {error}")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for shape in ((3 * 768, 768), (3 * 1024, 1024), (768, 3072), (1024, 4096)):
        compare(*shape)
