"""Times the Triton LayerNorm kernels over tile sizes and program counts. Run it with Python on a machine with a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import triton

from fasttfm.kernels.layer_norm import triton as kernels

SETS = 3


def main() -> None:
    source = torch.randn(1 << 28, device="cuda").bfloat16()
    target = torch.empty_like(source)
    copy_rate = 2 * source.nbytes / microseconds(lambda _: target.copy_(source))
    print(f"copy {copy_rate / 1e6:.2f} TB/s")
    for rows, columns in ((32768, 1024), (32768, 4096), (32768, 768)):
        sweep(rows, columns, copy_rate)


def sweep(rows: int, columns: int, copy_rate: float) -> None:
    x = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(SETS)]
    weight, bias = torch.randn(2, columns, device="cuda")
    _, statistics = kernels.layer_norm_forward_triton(x[0], weight, bias, 1e-5)

    def forward(i: int) -> None:
        kernels.layer_norm_forward_triton(x[i % SETS], weight, bias, 1e-5)

    def backward(i: int) -> None:
        kernels.layer_norm_backward_triton(x[i % SETS], x[(i + 1) % SETS], weight, bias, statistics, True, True)

    for elements, per_thread in itertools.product((1024, 2048, 4096, 8192), (8, 16, 32)):
        tile = kernels._tile(columns, elements, per_thread)
        kernels._forward_tile = lambda _, tile=tile: dict(tile)
        report("forward", rows, columns, tile, 0, microseconds(forward), 2 * x[0].nbytes / copy_rate)
    for elements, per_thread, programs in itertools.product((1024, 2048, 4096), (8, 16, 32), (2, 4, 8)):
        tile = kernels._tile(columns, elements, per_thread)
        kernels._backward_tile = lambda _, tile=tile: dict(tile)
        kernels._PROGRAMS_PER_MULTIPROCESSOR = programs
        report("backward", rows, columns, tile, programs, microseconds(backward), 3 * x[0].nbytes / copy_rate)


def microseconds(call: Callable[[int], object], repeats: int = 30) -> float:
    """Median over replays of a CUDA graph that holds ``repeats`` calls."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            call(i)
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / repeats)
    return sorted(times)[2]


def report(
    direction: str, rows: int, columns: int, tile: dict[str, int], programs: int, us: float, limit: float
) -> None:
    print(
        f"{direction:8} {rows}x{columns} rows {tile['BLOCK_N']:2} warps {tile['num_warps']:2} programs/SM {programs} "
        f"{us:7.1f} us {limit / us:.3f} of copy",
        flush=True,
    )


if __name__ == "__main__":
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {torch.cuda.get_device_name()}")
    main()
