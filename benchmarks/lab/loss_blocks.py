"""What a loss over a vocabulary takes on a GPU, and how to cut its blocks: ``python benchmarks/lab/loss_blocks.py``.

For masked-LM heads (4915 predicted rows of 32,768, V = 30,522) and a causal one (32,768 rows, V = 50,257), in bf16: the
three matrix products at several block sizes, dweight added up in fp32 or rounded to bf16; the pass over the logits with
several tiles; the whole op at several block sizes, with its memory; and what its kernels take, one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import torch
import triton
from torch import Tensor

from fasttfm.kernels.common.cross_entropy import Loss
from fasttfm.kernels.linear_cross_entropy import triton as kernels
from fasttfm.ops import column_sum, linear_cross_entropy, masked_lm_loss, vocabulary
from fasttfm.testing import bench_timing as timing

CALLS = 3


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
        samples = timing.measure(graphs, timing.CudaClock(), timing.Effort(1e-3, 0.1))
    for name, why in samples.failures.items():
        print(f"  {name}: {why}")
    return {name: timing.percentiles(found)[1] * 1e3 for name, found in samples.seconds.items()}


def tensors(rows: int, columns: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, columns, device="cuda").bfloat16()
    weight = (columns**-0.5 * torch.randn(words, columns, device="cuda")).bfloat16()
    return hidden, weight, torch.randint(0, words, (rows,), device="cuda")


def products(columns: int, words: int) -> None:
    """Each product of one block."""
    print(f"\nproducts of a block, C={columns}, V={words}: ms (TFLOP/s)")
    dweight = torch.zeros(words, columns, device="cuda")
    for rows in (512, 983, 1024, 1639, 2048, 4096, 4915):
        found = measure(products_of_block(*tensors(rows, columns, words)[:2], dweight))
        flops = 2 * rows * columns * words
        print(f"  {rows:5} rows: " + ", ".join(f"{k} {v:.3f} ({flops / v / 1e9:.0f})" for k, v in found.items()))


def products_of_block(hidden: Tensor, weight: Tensor, dweight: Tensor) -> dict[str, Callable[[], object]]:
    logits = torch.randn(len(hidden), vocabulary.padded(len(weight)), device="cuda").bfloat16()[:, : len(weight)]
    dh, narrow, single = torch.empty_like(hidden), torch.zeros_like(weight), torch.float32
    return {
        "logits": lambda: torch.mm(hidden, weight.t(), out=logits),
        "dh": lambda: torch.mm(logits, weight, out=dh),
        "dweight, fp32": lambda: torch.mm(logits.t(), hidden, out_dtype=single, out=dweight),
        "dweight, fp32, added": lambda: torch.addmm(dweight, logits.t(), hidden, out_dtype=single, out=dweight),
        "dweight, bf16": lambda: torch.mm(logits.t(), hidden, out=narrow),
        "column sum": lambda: column_sum(logits._base),
    }


def passes(words: int, rows: int = 1024) -> None:
    """The pass over a block of logits with several tiles; TB/s of one read and one write."""
    stride = vocabulary.padded(words)
    logits = torch.randn(rows, stride, device="cuda").bfloat16()
    bias = torch.randn(stride, device="cuda").bfloat16()
    labels = torch.randint(0, words, (rows,), device="cuda")
    outputs = (torch.empty(rows, device="cuda"), labels > 0, labels.clone())
    errors, seed = torch.full((2, 2), 2**62, device="cuda"), torch.tensor([7], device="cuda")
    print(f"\nthe pass over {rows} x {words} logits: ms (TB/s)")

    def call(given: Tensor | None, drawn: Tensor | None, loss: Loss) -> None:
        kernels.linear_cross_entropy_triton(logits, words, given, labels, None, drawn, outputs, 0, loss, True, errors)

    plain = {"plain": (None, None, Loss()), "bias": (bias, None, Loss())}
    more = {"counts": (bias, None, Loss(count_correct=True)), "samples": (bias, seed, Loss())}
    for block_v in (2048, 4096, 8192, 16384, 32768):
        for num_warps in (4, 8, 16, 32):
            if not 8 <= block_v // (32 * num_warps) <= 64:
                continue
            tile = {"BLOCK_V": block_v, "num_warps": num_warps}
            options = {**plain, **(more if tile == kernels._tile(stride) else {})}
            calls = {name: functools.partial(call, *given) for name, given in options.items()}
            with mock.patch.object(kernels, "_tile", lambda columns, tile=tile: tile):
                found = measure(calls)
            rates = [f"{k} {v:.4f} ({2 * logits.nbytes / v / 1e9:.2f})" for k, v in found.items()]
            print(f"  {block_v:5} x {num_warps:2}: " + ", ".join(rates), flush=True)


def whole(name: str, step: Callable[[], object], flops: float) -> None:
    """The op, forward and backward, with other numbers of rows in a block."""
    print(f"\n{name}: forward and backward")
    for rows, blocks in ((512, 64), (1024, 8), (1280, 4), (1664, 3), (2048, 8), (2560, 2), (4096, 8), (8192, 4)):
        with mock.patch.multiple(vocabulary, _ROWS=rows, _BLOCKS=blocks, _BYTES=2**31):
            found = measure({"op": step}).get("op")
            peak = peak_mib(step)
        if found:
            rate = f"{found:.3f} ms ({flops / found / 1e9:.0f} TFLOP/s), {peak:.0f} MiB"
            print(f"  at least {rows} rows, at most {blocks} blocks: {rate}")


def peak_mib(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def kernel_times(step: Callable[[], object]) -> None:
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda event: -event.device_time_total)[:16]:
        print(f"  {event.device_time_total / 4e3:8.4f} ms  {event.count / 4:5.1f} x  {event.key[:110]}")


def main() -> None:
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {torch.cuda.get_device_name()}")
    products(1024, 30522)
    products(768, 30522)
    passes(30522)
    passes(50257)
    for columns in (1024, 768):
        tokens, predicted, words = 32768, 4915, 30522
        hidden, weight, _ = tensors(tokens, columns, words)
        bias = torch.zeros(words, device="cuda", dtype=torch.bfloat16)
        positions = torch.randperm(tokens, device="cuda")[:predicted].sort().values
        labels = torch.randint(0, words, (predicted,), device="cuda")
        wanted = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]

        def step(wanted: list[Tensor] = wanted, labels: Tensor = labels, positions: Tensor = positions) -> object:
            return torch.autograd.grad(masked_lm_loss(*wanted, labels, positions=positions), wanted)

        whole(f"masked_lm_loss {predicted} of {tokens} x {columns} x {words}", step, 6 * predicted * columns * words)
        kernel_times(step)
    hidden, weight, labels = tensors(32768, 768, 50257)
    hidden.requires_grad_(), weight.requires_grad_()

    def causal() -> object:
        return torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))

    whole("linear_cross_entropy 32768 x 768 x 50257", causal, 6 * 32768 * 768 * 50257)
    kernel_times(causal)


if __name__ == "__main__":
    main()
