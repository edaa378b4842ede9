"""Times the ways to compute an MLP, forward and backward: ``python benchmarks/lab/mlp_ways.py`` on a GPU.

Each way is a function of (x, w1, b1, w2, b2, dy) that returns y, dx, dw1, db1, dw2, db2. They take turns as CUDA
graphs; the table gives milliseconds, the ratio to the bare matrix products and the worst result's error against fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from fasttfm.bench import timing
from fasttfm.ops import column_sum, mlp

sys.path.insert(0, str(Path(__file__).parent))
import linear_gelu_triton as kernels

Way = Callable[..., tuple[Tensor, ...]]
CALLS = 3
TOKENS, CHUNK = 32768, 4096  # a chunk of the inner activations, 24 or 32 MiB, stays in the L2


@torch.no_grad()
def bare_products(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    h = torch.mm(x, w1.t())
    y = torch.mm(h, w2.t())
    dh = torch.mm(dy, w2)
    return y, torch.mm(dh, w1), torch.mm(dh.t(), x), b1, torch.mm(dy.t(), h), b2


def by_autograd(function: Callable[..., Tensor]) -> Way:
    def way(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        y = function(x, w1, b1, w2, b2)
        return y.detach(), *torch.autograd.grad(y, (x, w1, b1, w2, b2), dy)

    return way


def torch_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, approximate: str = "none") -> Tensor:
    linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu
    return linear(gelu(linear(x, w1, b1), approximate=approximate), w2, b2)


def finish(dy: Tensor, x: Tensor, w1: Tensor, dh: Tensor, a: Tensor) -> tuple[Tensor, ...]:
    """dx, dw1, dw2 and db2 out of what all ways have in the end."""
    return torch.mm(dh, w1), torch.mm(dh.t(), x), torch.mm(dy.t(), a), column_sum(dy)


@torch.no_grad()
def one_backward_pass(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """The vendor's products; the backward's pass writes dh and the activation again."""
    h = torch.mm(x, w1.t())
    a, dh = torch.empty_like(h), torch.empty_like(h)
    parts = kernels.backward_parts(h)
    kernels.forward_pass(h, b1, a)
    y = torch.addmm(b2, a, w2.t())
    kernels.backward_pass(torch.mm(dy, w2), h, b1, dh, a, parts)
    dx, dw1, dw2, db2 = finish(dy, x, w1, dh, a)
    return y, dx, dw1, column_sum(parts, dtype=b1.dtype), dw2, db2


@torch.no_grad()
def in_chunks(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """The same, each pass directly after the product of a chunk of tokens, while that is in the L2."""
    h = torch.empty(x.shape[0], w1.shape[0], dtype=x.dtype, device=x.device)
    a, dh = torch.empty_like(h), torch.empty_like(h)
    y = torch.empty_like(x)
    parts = kernels.backward_parts(h)
    buffer = torch.empty(CHUNK, w1.shape[0], dtype=x.dtype, device=x.device)
    chunks = [slice(start, start + CHUNK) for start in range(0, x.shape[0], CHUNK)]
    for chunk in chunks:
        torch.mm(x[chunk], w1.t(), out=h[chunk])
        kernels.forward_pass(h[chunk], b1, buffer)
        torch.addmm(b2, buffer, w2.t(), out=y[chunk])
    for index, chunk in enumerate(chunks):
        torch.mm(dy[chunk], w2, out=buffer)
        kernels.backward_pass(buffer, h[chunk], b1, dh[chunk], a[chunk], parts.chunk(len(chunks))[index])
    dx, dw1, dw2, db2 = finish(dy, x, w1, dh, a)
    return y, dx, dw1, column_sum(parts, dtype=b1.dtype), dw2, db2


@torch.no_grad()
def vendor_epilogue(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """The vendor library's GELU epilogue (tanh form). It keeps no pre-activation: the backward multiplies once more."""
    a = torch._addmm_activation(b1, x, w1.t(), use_gelu=True)
    y = torch.addmm(b2, a, w2.t())
    u = torch.addmm(b1, x, w1.t())
    dh = torch.ops.aten.gelu_backward(torch.mm(dy, w2), u, approximate="tanh")
    dx, dw1, dw2, db2 = finish(dy, x, w1, dh, a)
    return y, dx, dw1, column_sum(dh), dw2, db2


def triton_products(forward: dict[str, int], backward: dict[str, int] | None) -> Way:
    """Triton's product with the forward's ending, and with the backward's too where its tiles are given."""

    @torch.no_grad()
    def way(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        h, a = kernels.matmul_gelu(x, w1, b1, forward)
        y = torch.addmm(b2, a, w2.t())
        if backward is not None:
            dh, a, total = kernels.matmul_gelu_backward(dy, w2, b1, h, backward)
            db1 = total.to(b1.dtype)
        else:
            dh, parts = torch.empty_like(h), kernels.backward_parts(h)
            kernels.backward_pass(torch.mm(dy, w2), h, b1, dh, a, parts)
            db1 = column_sum(parts, dtype=b1.dtype)
        dx, dw1, dw2, db2 = finish(dy, x, w1, dh, a)
        return y, dx, dw1, db1, dw2, db2

    return way


def measure(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each call, as CUDA graphs that take turns. One that fails is left out and said so."""
    stream = torch.cuda.Stream()
    graphs = {}
    with torch.cuda.stream(stream):
        for name, call in calls.items():
            try:
                for _ in range(2):
                    call()
                work = timing.Work(lambda call=call: [call() for _ in range(CALLS)], CALLS)
                graphs[name] = timing.captured(work, stream)
            except Exception as error:  # a way that this machine cannot go
                print(f"  {name}: {timing.reason(error)}")
        samples = timing.measure(graphs, timing.CudaClock(), timing.Effort(1e-3, 0.2))
    for name, why in samples.failures.items():
        print(f"  {name}: {why}")
    return {name: timing.percentiles(found)[1] * 1e3 for name, found in samples.seconds.items()}


def worst_error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


def exact_results(tensors: tuple[Tensor, ...], approximate: str) -> tuple[Tensor, ...]:
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    return by_autograd(lambda *given: torch_mlp(*given, approximate=approximate))(*wide)


def fastest_tiles(tensors: tuple[Tensor, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Times single products; returns Triton's fastest tiles for the forward's ending and for the backward's."""
    x, w1, b1, w2, _, dy = (tensor.detach() for tensor in tensors)
    h = torch.mm(x, w1.t())
    calls: dict[str, Callable[[], object]] = {
        "vendor": lambda: torch.mm(x, w1.t()),
        "vendor, dy w2": lambda: torch.mm(dy, w2),
        "vendor, tanh epilogue": lambda: torch._addmm_activation(b1, x, w1.t(), use_gelu=True),
        "eager linear and gelu": lambda: torch.nn.functional.gelu(torch.nn.functional.linear(x, w1, b1)),
    }
    for index, config in enumerate(kernels.CONFIGS):
        calls[f"Triton {index}"] = lambda config=config: kernels.matmul(x, w1.t(), config)
        calls[f"Triton {index}, forward"] = lambda config=config: kernels.matmul_gelu(x, w1, b1, config)
        calls[f"Triton {index}, backward"] = lambda config=config: kernels.matmul_gelu_backward(dy, w2, b1, h, config)
    times = measure(calls)
    for name, milliseconds in times.items():
        print(f"  {name:<24} {milliseconds:7.3f} ms  {2 * h.numel() * x.shape[1] / milliseconds / 1e9:6.0f} TFLOP/s")

    def fastest(ending: str) -> dict[str, int]:
        found = min((name for name in times if name.endswith(ending)), key=times.__getitem__)
        config = kernels.CONFIGS[int(found.removeprefix("Triton ").removesuffix(ending))]
        print(f"  fastest{ending}: {config}")
        return config

    return fastest(", forward"), fastest(", backward")


def compare(columns: int) -> None:
    inner = 4 * columns
    torch.manual_seed(0)
    shapes = ((TOKENS, columns), (inner, columns), (inner,), (columns, inner), (columns,), (TOKENS, columns))
    scales = (1.0, columns**-0.5, 1.0, inner**-0.5, 1.0, 1.0)
    pairs = zip(shapes, scales, strict=True)
    tensors = tuple((scale * torch.randn(shape, device="cuda")).bfloat16().requires_grad_() for shape, scale in pairs)
    print(f"\n{TOKENS} x {columns} x {inner}: one product, without and with an ending")
    forward, backward = fastest_tiles(tensors)
    ways: dict[str, Way] = {
        "bare products": bare_products,
        "torch eager": by_autograd(torch_mlp),
        "torch.compile": by_autograd(torch.compile(torch_mlp, fullgraph=True, dynamic=False)),
        "fasttfm, recomputed": by_autograd(mlp),
        "fasttfm, saved": by_autograd(lambda *given: mlp(*given, recompute=False)),
        "one backward pass": one_backward_pass,
        "in chunks": in_chunks,
        "vendor tanh epilogue": vendor_epilogue,
        "Triton forward": triton_products(forward, None),
        "Triton both": triton_products(forward, backward),
    }
    times = measure({name: lambda way=way: way(*tensors) for name, way in ways.items()})
    exact = {form: exact_results(tensors, form) for form in ("none", "tanh")}
    print(f"\n{TOKENS} x {columns} x {inner}: forward and backward")
    for name, milliseconds in times.items():
        ratio = milliseconds / times["bare products"]
        error = "" if name == "bare products" else f"{worst_error(ways[name](*tensors), exact[form_of(name)]):.1e}"
        print(f"  {name:<24} {milliseconds:7.3f} ms  {ratio:5.3f} of bare  error {error}")


def form_of(way: str) -> str:
    return "tanh" if "tanh" in way else "none"


if __name__ == "__main__":
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {torch.cuda.get_device_name()}")
    for width in (768, 1024):
        compare(width)
