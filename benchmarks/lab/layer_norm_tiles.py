"""Times the Triton LayerNorm kernels over tile sizes and program counts: ``python benchmarks/lab/layer_norm_tiles.py`` on a GPU."""

from __future__ import annotations

import itertools

import torch
import triton

from fasttfm.kernels.layer_norm import triton as kernels

SETS = 3


def main() -> None:
    source = torch.randn(1 << 28, device="cuda").bfloat16()
    target = torch.empty_like(source)
    copy_rate = 2 * source.nbytes / microseconds(lambda i: target.copy_(source))
    print(f"copy {copy_rate / 1e6:.2f} TB/s")
    for rows, columns in ((32768, 1024), (32768, 4096), (32768, 768)):
        x = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(SETS)]
        weight, bias = torch.randn(2, columns, device="cuda")
        _, mean, rstd = kernels.layer_norm_forward_triton(x[0], weight, bias, 1e-5)
        forward, backward = kernels._forward_tile, kernels._backward_tile
        for elements, per_thread in itertools.product((1024, 2048, 4096, 8192), (8, 16, 32)):
            tile = kernels._tile(columns, elements, per_thread)
            kernels._forward_tile = lambda _, tile=tile: dict(tile)
            us = microseconds(lambda i: kernels.layer_norm_forward_triton(x[i % SETS], weight, bias, 1e-5))  # noqa: B023
            report("forward", rows, columns, tile, 0, us, 2 * x[0].nbytes / copy_rate)
        for elements, per_thread, programs in itertools.product((1024, 2048, 4096), (8, 16, 32), (2, 4, 8)):
            tile = kernels._tile(columns, elements, per_thread)
            kernels._backward_tile = lambda _, tile=tile: dict(tile)
            kernels._PROGRAMS_PER_MULTIPROCESSOR = programs
            us = microseconds(
                lambda i: kernels.layer_norm_backward_triton(
                    x[i % SETS], x[(i + 1) % SETS], weight, mean, rstd, True, True
                )  # noqa: B023
            )
            report("backward", rows, columns, tile, programs, us, 3 * x[0].nbytes / copy_rate)
        kernels._forward_tile, kernels._backward_tile = forward, backward


def microseconds(call: object, repeats: int = 30) -> float:
    """Median over replays of a CUDA graph that holds ``repeats`` calls."""
    for i in range(3):
        call(i)  # type: ignore[operator]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            call(i)  # type: ignore[operator]
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
