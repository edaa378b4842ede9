"""Times the parts of a loss over a vocabulary, for several block sizes: ``python benchmarks/lab/loss_blocks.py``.

For masked-LM heads (4915 predicted rows of 32,768, V = 30,522) and a causal one (32,768 rows, V = 50,257), in bf16: the
three GEMMs of a block, with V as it is and rounded down to a multiple of 8, 64 or 128; the small kernels around them;
the pass over the logits with several tiles; the whole op at several block sizes, with its memory; and the time of each
of its kernels. It takes less than a minute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import torch
import triton
from torch import Tensor

from fasttfm.bench import timing
from fasttfm.kernels.linear_cross_entropy import triton as kernels
from fasttfm.kernels.vocabulary import triton_scale, triton_tail
from fasttfm.kernels.vocabulary.cross_entropy import Loss
from fasttfm.ops import column_sum, linear_cross_entropy, masked_lm_loss, vocabulary
from fasttfm.ops.core.checks import in_one_line

CALLS = 3
Calls = dict[str, Callable[[], object]]


def measure(calls: Calls) -> dict[str, float]:
    """Median milliseconds of each call, as CUDA graphs that alternate. The error of a call that fails is printed."""
    stream = torch.cuda.Stream()
    graphs = {}
    with torch.cuda.stream(stream):
        for name, call in calls.items():
            try:
                for _ in range(2):
                    call()
                work = timing.Work(lambda call=call: [call() for _ in range(CALLS)], CALLS)
                graphs[name] = timing.captured(work, stream)
            except Exception as error:  # a variant that this machine does not support
                print(f"  {name}: {in_one_line(error)}")
        samples = timing.measure(graphs, timing.CudaClock(), timing.Effort(1e-3, 0.03))
    for name, why in samples.failures.items():
        print(f"  {name}: {why}")
    return {name: timing.percentiles(seconds)[1] * 1e3 for name, seconds in samples.seconds.items()}


def tensors(rows: int, columns: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, columns, device="cuda").bfloat16()
    weight = (columns**-0.5 * torch.randn(words, columns, device="cuda")).bfloat16()
    return hidden, weight, torch.randint(0, words, (rows,), device="cuda")


def products(columns: int, words: int, counts: tuple[int, ...]) -> None:
    """Each GEMM of one block."""
    dweight = torch.zeros(words, columns, device="cuda")
    for step in (1, 8, 64, 128):
        even = words // step * step
        print(f"\nproducts of a block, C={columns}, {even} of {words} words: ms (TFLOP/s)")
        for rows in counts if step == 8 else counts[1:2]:
            hidden, weight, _ = tensors(rows, columns, words)
            logits = torch.randn(rows, vocabulary.padded(words), device="cuda").bfloat16()
            times = measure(products_of_block(hidden, weight[:even], logits[:, :even], dweight[:even]))
            flops = 2 * rows * columns * even
            print(f"  {rows:5} rows: " + ", ".join(f"{k} {v:.3f} ({flops / v / 1e9:.0f})" for k, v in times.items()))


def products_of_block(hidden: Tensor, weight: Tensor, logits: Tensor, dweight: Tensor) -> Calls:
    dh, narrow, single = torch.zeros_like(hidden), torch.zeros_like(weight), torch.float32
    return {
        "logits": lambda: torch.mm(hidden, weight.t(), out=logits),
        "dh": lambda: torch.mm(logits, weight, out=dh),
        "dh, added": lambda: torch.addmm(dh, logits, weight, out=dh),
        "dweight, fp32": lambda: torch.mm(logits.t(), hidden, out_dtype=single, out=dweight),
        "added": lambda: torch.addmm(dweight, logits.t(), hidden, out_dtype=single, out=dweight),
        "dweight, bf16": lambda: torch.mm(logits.t(), hidden, out=narrow),
        "bf16, added": lambda: torch.addmm(narrow, logits.t(), hidden, out=narrow),
    }


def small_kernels(columns: int = 1024, words: int = 30522, rows: int = 1024, count: int = 4915) -> None:
    hidden, weight, _ = tensors(count, columns, words)
    logits = torch.randn(rows, vocabulary.padded(words), device="cuda").bfloat16()
    even = words // 8 * 8
    last, g = weight[even:], torch.zeros(count, 8, device="cuda", dtype=torch.bfloat16)
    sums, total = torch.zeros(8, columns, device="cuda"), torch.randn(words, columns, device="cuda")
    half, one, dh = torch.empty_like(weight), torch.ones((), device="cuda"), torch.zeros_like(hidden)
    block = hidden[:rows]
    calls = {
        "last words' logits": lambda: triton_tail.logits(block, last, logits[:, even:words]),
        "in torch": lambda: torch.mm(block, last.t(), out=logits[:, even:words]),
        "last words' dh": lambda: triton_tail.start(logits[:, even:words], last, dh[:rows], g[:rows]),
        "their dweight, all rows": lambda: torch.mm(g.t(), hidden, out_dtype=torch.float32, out=sums),
        "a block's rows": lambda: torch.mm(g[:rows].t(), block, out_dtype=torch.float32, out=sums),
        "dweight scaled": lambda: triton_scale.scale(total, one, half),
        "in torch, too": lambda: torch.mul(total, one, out=half),
        "column sum": lambda: column_sum(logits),
    }
    print(f"\nsmall kernels, C={columns}, V={words}, {rows} rows of {count}: us")
    print("  " + ", ".join(f"{name} {1e3 * value:.1f}" for name, value in measure(calls).items()))


def passes(words: int, rows: int) -> None:
    """The pass over a block of logits with several tiles: TB/s of one read and one write."""
    stride = vocabulary.padded(words)
    logits = torch.randn(rows, stride, device="cuda").bfloat16()
    bias = torch.randn(stride, device="cuda").bfloat16()
    labels = torch.randint(0, words, (rows,), device="cuda")
    outputs = (torch.empty(rows, device="cuda"), labels > 0, labels.clone())
    errors, seed = torch.full((2, 2), 2**62, device="cuda"), torch.tensor([7], device="cuda")
    print(f"\nthe pass over {rows} x {words} logits: ms (TB/s)")

    def call(bias: Tensor | None, drawn: Tensor | None, loss: Loss, gradient: bool = True) -> None:
        kernels.linear_cross_entropy_triton(
            logits, words, bias, labels, None, drawn, outputs, 0, loss, gradient, errors
        )

    plain = {"plain": (None, None, Loss()), "bias": (bias, None, Loss()), "loss only": (bias, None, Loss(), False)}
    more = {"counts": (bias, None, Loss(count_correct=True)), "samples": (bias, seed, Loss())}
    tiles = ((4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32), (32768, 32))
    for block_v, num_warps in tiles:
        tile = {"BLOCK_V": block_v, "GROUP": 8, "num_warps": num_warps}
        options = {**plain, **(more if num_warps == 16 else {})}
        calls = {name: functools.partial(call, *arguments) for name, arguments in options.items()}
        with mock.patch.object(kernels, "_tile", lambda *_, tile=tile, **__: tile):
            times = measure(calls)
        rates = [f"{k} {v:.4f} ({2 * logits.nbytes / v / 1e9:.2f})" for k, v in times.items()]
        print(f"  {block_v:5} x {num_warps:2}: " + ", ".join(rates), flush=True)


def whole(name: str, step: Callable[[], object], flops: float, cuts: tuple[tuple[int, int], ...]) -> None:
    """The op, forward and backward, with several numbers of rows per block."""
    print(f"\n{name}: forward and backward")
    for rows, blocks in cuts:
        with mock.patch.multiple(vocabulary, _ROWS=rows, _BLOCKS=blocks, _BYTES=2**31):
            milliseconds = measure({"op": step}).get("op")
            peak = peak_mib(step)
        if milliseconds:
            rate = f"{milliseconds:.3f} ms ({flops / milliseconds / 1e9:.0f} TFLOP/s), {peak:.0f} MiB"
            print(f"  at least {rows} rows, at most {blocks} blocks: {rate}", flush=True)


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
    for event in sorted(profile.key_averages(), key=lambda event: -event.device_time_total)[:18]:
        print(f"  {event.device_time_total / 4e3:8.4f} ms  {event.count / 4:5.1f} x  {event.key[:110]}")


def main() -> None:
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {torch.cuda.get_device_name()}")
    products(1024, 30522, (896, 1024, 1664, 2560, 4915))
    products(768, 30522, (896, 1024, 1664, 2560, 4915))
    products(768, 50257, (1024, 4096))
    small_kernels()
    passes(30522, 896)
    passes(50257, 4096)
    for columns in (1024, 768):
        tokens, predicted, words = 32768, 4915, 30522
        hidden, weight, _ = tensors(tokens, columns, words)
        bias = torch.zeros(words, device="cuda", dtype=torch.bfloat16)
        positions = torch.randperm(tokens, device="cuda")[:predicted].sort().values
        labels = torch.randint(0, words, (predicted,), device="cuda")
        leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]

        def step(leaves: list[Tensor] = leaves, labels: Tensor = labels, positions: Tensor = positions) -> object:
            return torch.autograd.grad(masked_lm_loss(*leaves, labels, positions=positions), leaves)

        name = f"masked_lm_loss {predicted} of {tokens} x {columns} x {words}"
        cuts = ((491, 64), (614, 8), (768, 8), (983, 8), (1638, 8), (2457, 8), (4915, 8))
        whole(name, step, 6 * predicted * columns * words, cuts)
        kernel_times(step)
    hidden, weight, labels = tensors(32768, 768, 50257)
    hidden.requires_grad_(), weight.requires_grad_()

    def causal() -> object:
        return torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))

    cuts = ((1024, 32), (2048, 16), (4096, 8), (8192, 4))
    whole("linear_cross_entropy 32768 x 768 x 50257", causal, 6 * 32768 * 768 * 50257, cuts)
    kernel_times(causal)


if __name__ == "__main__":
    main()
