"""Finds the fastest tiles of attention's Triton kernels: ``python benchmarks/lab/attention_tiles.py [--only TEXT]``.

Every configuration is checked against plain torch before it is timed. Configurations are compiled first, in parallel
processes. Prints every time, then the best of each case next to the peers' times in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fasttfm.kernels.attention import triton as launchers
from fasttfm.kernels.attention import tuning
from fasttfm.kernels.attention.problem import UNLIMITED, AttentionProblem
from fasttfm.kernels.attention.tuning import Tiles
from fasttfm.kernels.common import philox

Choice = dict[str, Tiles | None]  # function of tuning -> its result


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    S: int
    D: int = 64
    causal: bool = False
    p: float = 0.0
    packed: bool = False  # lengths from S / 8 to S, in random order

    def __str__(self) -> str:
        marks = [f"S{self.S}", f"D{self.D}"]
        marks += ["causal"] * self.causal + [f"p{self.p}"] * (self.p > 0) + ["packed"] * self.packed
        return " ".join(marks)

    @property
    def lengths(self) -> list[int]:
        if not self.packed:
            return [self.S] * self.B
        if self.B == 1:
            return [self.S]
        least = self.S // 8
        return [least + (self.S - least) * (i * 37 % self.B) // (self.B - 1) for i in range(self.B - 1)] + [self.S]

    @property
    def flops(self) -> float:
        return sum(4.0 * self.H * self.D * n * n for n in self.lengths) * (0.5 if self.causal else 1)


CASES = [
    *(Case(256, 16, 64, p=p) for p in (0.0, 0.1)),
    *(Case(128, 16, 128, p=p) for p in (0.0, 0.1)),
    *(Case(64, 16, 256, p=p) for p in (0.0, 0.1)),
    *(Case(32, 16, 512, p=p) for p in (0.0, 0.1)),
    *(Case(64, 16, 512, p=p, packed=True) for p in (0.0, 0.1)),
    Case(256, 16, 128, packed=True),
    *(Case(16, 16, 1024, p=p) for p in (0.0, 0.1)),
    Case(32, 8, 512, 128),
    Case(8, 8, 2048, 128),
    Case(4, 16, 4096),
    Case(128, 16, 128, causal=True),
    Case(32, 16, 512, causal=True),
    Case(8, 16, 2048, causal=True),
]


def forward_choices(case: Case) -> Iterator[Choice]:
    if case.S <= 64:
        yield from ({"short_forward_tiles": Tiles(64, 64, 4, 3, programs=programs)} for programs in (1, 2))
    elif case.S <= 128:
        yield {"short_forward_tiles": Tiles(128, 128, 8, 3)}
        yield {"short_forward_tiles": Tiles(128, 128, 8, 2, registers=128, programs=2)}
    tiles = [Tiles(64, 64, 4, 3)]
    if case.D > 64:
        tiles += [Tiles(128, 64, 8, 4), Tiles(128, 128, 8, 3)]
    elif case.S > 128:
        tiles += [Tiles(64, 64, 4, 4)]
    if case.S >= 512 and case.D <= 64 and not case.p:
        tiles += [Tiles(128, 64, 8, 3)]
    for choice in tiles:
        yield {"forward_tiles": choice, "short_forward_tiles": None}


def backward_choices(case: Case) -> Iterator[Choice]:
    first = case.p == 0
    if case.S <= 64:
        yield from ({"short_backward_tiles": Tiles(64, 64, 4, 3, programs=programs)} for programs in (1, 2))
    elif case.S <= 128:
        yield {"short_backward_tiles": Tiles(128, 128, 8, 3)}
        yield {"short_backward_tiles": Tiles(128, 128, 8, 2)}
    if case.D > 64:
        query, key = Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 2, keys_first=True)
        queries, keys = [query, Tiles(128, 64, 8, 3)], [key._replace(ahead=1), Tiles(128, 64, 8, 2, ahead=1)]
    else:
        query, key = Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2, keys_first=first)
        queries, keys = [query], [key._replace(ahead=2)]
        if case.S > 128:
            queries += [Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 4)]
            keys += [key._replace(stages=3, ahead=2)]
            keys += [key._replace(keys_first=False, stages=stages, ahead=2) for stages in (2, 3) if first]
    pairs = [*((chosen, key) for chosen in queries), *((query, chosen) for chosen in keys)]
    for query_choice, key_choice in pairs:
        yield {"query_tiles": query_choice, "key_tiles": key_choice, "short_backward_tiles": None}


def name_of(choice: Choice) -> str:
    short = {"forward_tiles": "", "query_tiles": "q ", "key_tiles": "kv "}
    short |= {"short_forward_tiles": "short ", "short_backward_tiles": "short "}
    return " ".join(
        f"{short[key]}{t.queries}x{t.keys} w{t.warps} s{t.stages}"
        + (f" r{t.registers}" if t.registers else "")
        + (f" a{t.ahead}" if t.ahead else f" p{t.programs}" if key.startswith("short") else "")
        + " T" * t.keys_first
        for key, t in choice.items()
        if isinstance(t, Tiles)
    )


@contextlib.contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    before = {name: getattr(tuning, name) for name in choice}
    for name, value in choice.items():
        setattr(tuning, name, lambda *_, value=value: value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(tuning, name, value)


class Problem:
    """Tensors of a case, and the result of plain torch for its last sequence."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        lengths = case.lengths
        shape = (sum(lengths),) if case.packed else (case.B, case.S)
        self.case = case
        self.q, self.k, self.v, self.dout = (
            torch.randn(*shape, case.H, case.D, device="cuda", generator=generator).bfloat16() for _ in range(4)
        )
        bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int() if case.packed else None
        self.problem = AttentionProblem(
            max_seqlen=case.S,
            max_seqlen_k=case.S,
            scale=case.D**-0.5,
            window_right=0 if case.causal else UNLIMITED,
            cu_seqlens=bounds,
            seed=torch.tensor([1234567890123], device="cuda") if case.p else None,
            p=case.p,
        )
        self.gradients = tuple(torch.empty_like(t) for t in (self.q, self.k, self.v))

    def forward(self) -> tuple[Tensor, Tensor]:
        return launchers.attention_fwd_triton(self.q, self.k, self.v, self.problem)

    def backward(self, out: Tensor, lse: Tensor) -> None:
        launchers.attention_bwd_triton(self.dout, self.q, self.k, self.v, out, lse, self.problem, *self.gradients)

    def last(self, tensor: Tensor) -> Tensor:
        return tensor[-self.case.S :] if self.case.packed else tensor[-1]

    def reference(self) -> list[Tensor]:
        """out, dq, dk, dv of the last sequence in fp32."""
        case = self.case
        q, k, v = (self.last(t).float().transpose(0, 1).requires_grad_() for t in (self.q, self.k, self.v))
        scores = q @ k.transpose(1, 2) * self.problem.scale
        if case.causal:
            scores = scores + torch.full((case.S, case.S), -torch.inf, device="cuda").triu(1)
        weights = scores.softmax(-1)
        if case.p:
            index = torch.arange(case.S, device="cuda")
            heads = torch.arange(case.H, device="cuda")[:, None]
            sequence = torch.tensor(case.B - 1, device="cuda")
            keep = philox.kept_weights(
                self.problem.seed, sequence, heads, index[None, :], case.S, self.problem.threshold
            )
            weights = weights * keep * self.problem.dropout_scale
        out = weights @ v
        out.backward(self.last(self.dout).float().transpose(0, 1))
        return [t.transpose(0, 1) for t in (out.detach(), q.grad, k.grad, v.grad)]


def error(result: Tensor, expected: Tensor) -> float:
    return ((result.float() - expected).norm() / expected.norm()).item()


def compile_one(task: tuple[Case, Choice, bool]) -> str:
    """Runs a small problem that compiles to the same code; returns the error, if there is one."""
    case, choice, backward = task
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        small = Problem(Case(1, 1, case.S, case.D, case.causal, case.p, case.packed))
        with chosen(choice):
            if backward:
                out = small.dout
                small.backward(out, torch.zeros((1, 1, case.S), device="cuda"))
            else:
                small.forward()
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{case} {name_of(choice)}: {problem}"[:300]
    return ""


def measure(run: Callable[[], object]) -> float:
    """Milliseconds of one call, from replays of a CUDA graph of several calls, which have no launch overhead."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    calls = max(2, min(20, int(3.0 / max(begin.elapsed_time(end), 0.02))))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        replay = graph.replay
    except RuntimeError as problem:
        print("not captured:", str(problem).split("\n")[0][:100])
        torch.cuda.synchronize()

        def replay() -> None:
            for _ in range(calls):
                run()

    times = []
    replay()
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def peer_times(case: Case, data: Problem) -> Iterator[tuple[str, float, float]]:
    """Name, forward and backward ms of each peer."""
    if case.packed:
        yield from varlen_times(case, data)
        return
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in (data.q, data.k, data.v))
    dout = data.dout.transpose(1, 2)
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):

        def forward(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=case.p, is_causal=case.causal)

        yield name, *forward_and_backward(forward, (q, k, v), dout)


def varlen_times(case: Case, data: Problem) -> Iterator[tuple[str, float, float]]:
    q, k, v = (t.detach().requires_grad_() for t in (data.q, data.k, data.v))
    bounds, lengths = data.problem.cu_seqlens, torch.tensor(case.lengths, device="cuda")
    if case.p == 0:
        from torch.nn.attention.varlen import varlen_attn

        yield (
            "varlen",
            *forward_and_backward(lambda: varlen_attn(q, k, v, bounds, bounds, case.S, case.S), (q, k, v), data.dout),
        )
    shape = (case.B, case.H, case.S, case.D)
    padded = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    mask = (torch.arange(case.S, device="cuda") < lengths[:, None])[:, None, None, :].expand(-1, 1, case.S, -1)

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*padded, attn_mask=mask, dropout_p=case.p)

    yield "padded cudnn", *forward_and_backward(forward, padded, torch.randn_like(padded[0]))


def forward_and_backward(forward: Callable[[], Tensor], inputs: object, dout: Tensor) -> tuple[float, float]:
    try:
        with torch.no_grad():
            forward_ms = measure(forward)
        out = forward()
        backward_ms = measure(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
    except Exception as problem:
        print("peer failed:", str(problem)[:200])
        return float("nan"), float("nan")
    return forward_ms, backward_ms


def compile_all(cases: list[Case], workers: int) -> None:
    tasks, seen = [], set()
    for case in cases:
        for backward, choices in ((False, forward_choices(case)), (True, backward_choices(case))):
            for choice in choices:
                key = (backward, case.D, case.causal, case.p > 0, case.packed, repr(choice))
                if key not in seen:
                    seen.add(key)
                    tasks.append((case, choice, backward))
    begin = time.time()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for problem in pool.imap_unordered(compile_one, tasks, chunksize=1):
            if problem:
                print("compile:", problem, flush=True)
    print(f"compiled {len(tasks)} in {time.time() - begin:.0f} s", flush=True)


def run_case(case: Case, until: float) -> list[str]:
    data = Problem(case)
    expected = data.reference()
    best: dict[str, tuple[float, str]] = {}
    out, lse = data.forward()
    for direction, factor, choices in (
        ("fwd", 1.0, forward_choices(case)),
        ("bwd", 2.5, backward_choices(case)),
    ):
        for choice in choices:
            if time.time() > until:
                break
            try:
                with chosen(choice):
                    if direction == "fwd":
                        outputs = [data.forward()[0]]
                        wrong = error(data.last(outputs[0]), expected[0])
                        ms = measure(data.forward)
                    else:
                        for gradient in data.gradients:
                            gradient.fill_(float("nan"))
                        data.backward(out, lse)
                        wrong = max(error(data.last(g), e) for g, e in zip(data.gradients, expected[1:], strict=True))
                        ms = measure(lambda: data.backward(out, lse))
            except Exception as problem:
                print(f"{case} {direction} {name_of(choice)}: {str(problem)[:150]}", flush=True)
                continue
            good = wrong < 0.02
            rate = factor * case.flops / ms / 1e9
            print(
                f"{case} {direction} {name_of(choice)}: {ms * 1000:.1f} us {rate:.0f} TFLOP/s"
                f"{'' if good else f' WRONG {wrong:.3f}'}",
                flush=True,
            )
            if good and ms < best.get(direction, (float("inf"), ""))[0]:
                best[direction] = ms, name_of(choice)
    peers = list(peer_times(case, data))
    lines = []
    for index, (direction, factor) in enumerate((("fwd", 1.0), ("bwd", 2.5))):
        ms, choice_name = best.get(direction, (float("nan"), "none"))
        rate = factor * case.flops / 1e9
        others = ", ".join(f"{p[0]} {p[1 + index] * 1000:.1f} us ({p[1 + index] / ms:.2f}x)" for p in peers)
        lines.append(f"{case} {direction}: {ms * 1000:.1f} us {rate / ms:.0f} TFLOP/s [{choice_name}] | {others}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=100.0, help="stop timing after this long")
    options = parser.parse_args()
    until = time.time() + options.seconds
    cases = [case for case in CASES if options.only in str(case)]
    compile_all(cases, options.workers)
    torch.backends.cuda.matmul.allow_tf32 = False
    lines = []
    for case in cases:
        try:
            lines += run_case(case, until)
        except Exception as problem:
            lines.append(f"{case}: {str(problem)[:200]}")
        torch.cuda.empty_cache()
    print("\n".join(["", "best of each case:", *lines]))


if __name__ == "__main__":
    main()
