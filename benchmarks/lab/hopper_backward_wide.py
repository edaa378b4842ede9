"""Checks and times the Hopper backward of attention at head dim 128 by itself, through libraries of its sources alone.

    python benchmarks/lab/hopper_backward_wide.py [--only checks|stress|times] [--cases NAMES] [--output DIRECTORY]

Checks hold it against reference.py in fp64 (same dropout) and repeat it for the same bits; stress repeats large cases;
times stand next to cuDNN's, and beside those of variants of the source. All run in processes of their own with a time
limit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hopper_backward
from hopper_backward import ROOT, WORK, lay_package, milliseconds, relative, repeat
from hopper_backward_cases import COMMON
from hopper_backward_cases import make as make_problem

DIM = 128

WRAPPER = """
extern "C" int backward(const fasttfm::AttentionBackward* call, const char** detail) {
  const fasttfm::Status status = fasttfm::cuda::attention_backward_wide(*call);
  *detail = status.detail;
  return static_cast<int>(status.code);
}
extern "C" int64_t workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen_k) {
  return fasttfm::cuda::attention_backward_wide_workspace(sequences, heads, tokens, max_seqlen_k);
}
"""

# Changes of the source whose times are compared: text to replace, and what stands there instead. Those from "without"
# on leave work out, and compute nonsense: they show what the work costs.
VARIANTS: dict[str, list[tuple[str, str]]] = {
    "forced": [("  return best;\n", '  return std::min<int64_t>(key_tiles, atoi(getenv("PARTS")));\n')],
    "plain": [  # dP after dQ has left
        ("    uint32_t dscores[16], left[16];\n", "    begin_dweights(own);\n    uint32_t dscores[16], left[16];\n"),
        (
            "      begin_dweights(next);\n      wait_products<1>();\n",
            "      pin(weights);\n      wait_products<0>();\n",
        ),
        ("    begin_dweights(even);\n", ""),
        ("over_tile<true>(odd, even,", "over_tile<true>(even, odd,"),
        ("over_tile<false>(odd, even,", "over_tile<false>(even, odd,"),
    ],
    "two_query_stages": [("kQueryStages = 3", "kQueryStages = 2")],
    "weights_first": [("      begin_dweights(next);\n", "      pin(weights);\n      begin_dweights(next);\n")],
    "one_draw": [("#pragma unroll\n          for (int j = 0;", "#pragma unroll 1\n          for (int j = 0;")],
    "unordered": [("while (load_acquire(turns) < turn) {", "while (turn < 0) {")],
    "without_drawing": [("const Draw drawn = draw_weights(seed,", "const Draw drawn{}; (void)(seed,")],
}
ONLY_BF16 = (": call.dtype == DType::f16 ? launch_wide<f16_t>(call, p)", "")
SOURCE = "attention/cuda_backward_wide.cu"


def inlined(name: str, seen: set[str]) -> str:
    """A source file with the kernel's own headers in the place of their first includes."""

    def header(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return inlined(match[1], seen).replace("#pragma once\n", "")

    return re.sub(
        r'#include "(attention/cuda_backward_wide_\w+\.cuh)"\n', header, (ROOT / "kernels" / name).read_text()
    )


def compile_variant(name: str, changes: list[tuple[str, str]], flags: str = "") -> subprocess.Popen[str]:
    kernel = inlined(SOURCE, set())
    for old, new in changes:
        if old not in kernel:
            print(f"{name}: the source has no {old!r}")
        kernel = kernel.replace(old, new)
    (WORK / f"wide_{name}.cu").write_text(kernel + WRAPPER)
    command = f"nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I{ROOT}/kernels -Xptxas=-v -shared {flags}"
    command += f" -Xcompiler -fPIC {WORK}/wide_{name}.cu -o {WORK}/wide_{name}.so"
    return subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def build(names: list[str]) -> str:
    lay_package()
    begin = time.time()
    started = [("base", compile_variant("base", []))]
    started += [(name, compile_variant(name, [*VARIANTS[name], ONLY_BF16])) for name in names]
    lines = []
    for name, process in started:
        log, _ = process.communicate()
        if process.returncode:
            print(log)
            if name == "base":
                sys.exit("nvcc failed")
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
        lines.append(f"{name}: {time.time() - begin:.1f} s, spill {spilled}, serialized {log.count('serialized')}")
    return "\n".join(lines)


# ---- one problem ----------------------------------------------------------------------------------------------------

CHECKS: dict[str, dict[str, Any]] = {
    **COMMON,
    "256": {"dense": (40, 256), "heads": 8},
    "causal_many": {"dense": (40, 512), "heads": 8, "causal": True},
    "4000": {"dense": (1, 4000), "heads": 8},
    "4000_causal": {"dense": (1, 4000), "heads": 8, "causal": True},
}


make = functools.partial(make_problem, head_dim=DIM)


class Backward(hopper_backward.Backward):
    def __init__(self, variant: str = "base") -> None:
        self.open(WORK / f"wide_{variant}.so")


def check(name: str) -> str:
    import torch

    from fasttfm.kernels.attention import reference

    torch.manual_seed(len(name) * 1000 + sum(map(ord, name)))
    problem, q, k, v, dout, *gradients = make(CHECKS[name])
    exact = [x.double() for x in (q, k, v, dout)]
    out, lse = reference.attention_forward(*exact[:3], problem)
    run = Backward().prepare(dout, q, k, v, out.to(q.dtype), lse.float(), problem, *gradients)
    run()
    torch.cuda.synchronize()
    expected = [torch.empty(x.shape, dtype=torch.float64, device="cuda") for x in gradients]
    reference.attention_backward(exact[3], *exact[:3], out, lse, problem, *expected)
    rows = slice(None) if problem.cu_seqlens is None else slice(0, -3)
    errors = [relative(a[rows], b[rows]) for a, b in zip(gradients, expected, strict=True)]
    past = problem.packed and any(not x[-3:].isnan().all() for x in gradients)
    differences = repeat(run, gradients, [rows] * 3, 30)
    good = all(error < 0.006 for error in errors) and not differences and not past
    text = " ".join(f"{error:.1e}" for error in errors)
    return f"{'ok  ' if good else 'BAD '} {name:12} dq dk dv {text}{' WROTE PAST THE END' if past else ''}{differences}"


STRESS: dict[str, dict[str, Any]] = {
    "32x512_p": {"dense": (32, 512), "heads": 8, "p": 0.1, "fused": True},
    "128x128_p": {"dense": (128, 128), "heads": 8, "p": 0.1},
    "32x512_causal": {"dense": (32, 512), "heads": 8, "causal": True},
    "packed_p": {"packed": tuple(1 + 511 * i // 99 for i in range(100)), "heads": 8, "p": 0.1},
    "8x2048": {"dense": (8, 2048), "heads": 8},
    "8x2000_causal_p": {"dense": (8, 2000), "heads": 8, "p": 0.1, "causal": True},
    "1x8000_causal": {"dense": (1, 8000), "heads": 8, "causal": True},
    "long_cross": {"packed": (700, 64) * 8, "packed_k": (300, 1000) * 8, "heads": 8, "causal": True},
    "short_cross": {"packed": (64,) * 16, "packed_k": (1000,) * 16, "heads": 8, "causal": True},
}


def some_statistics(q: Any, problem: Any) -> tuple[Any, Any]:
    """Not those of a forward: neither bits nor times need them."""
    import torch

    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), 8.0, device="cuda")
    return torch.randn(q.shape, device="cuda", dtype=q.dtype), lse


def stressed(name: str) -> str:
    problem, q, k, v, dout, *gradients = make(STRESS[name])
    run = Backward().prepare(dout, q, k, v, *some_statistics(q, problem), problem, *gradients)
    rows = slice(None) if problem.cu_seqlens is None else slice(0, -3)
    differences = repeat(run, gradients, [rows] * 3, 40)
    finite = all(bool(x[rows].isfinite().all()) for x in gradients)
    return f"{'BAD ' if differences or not finite else 'ok  '} stress {name:18} finite {finite}{differences}"


# ---- times ----------------------------------------------------------------------------------------------------------

TIMES: dict[str, dict[str, Any]] = {
    f"{16384 // size}x{size}{'_causal' if causal else ''}{'_p' if p else ''}": {
        "dense": (16384 // size, size),
        "heads": 8,
        "p": p,
        "causal": causal,
        "fused": True,
    }
    for size, causal, p in (
        (512, False, 0.0),
        (2048, False, 0.0),
        (16384, False, 0.0),
        (512, True, 0.0),
        (2048, True, 0.0),
        (16384, True, 0.0),
        (512, False, 0.1),
        (2048, False, 0.1),
        (128, False, 0.0),
        (128, False, 0.1),
        (256, False, 0.0),
        (256, False, 0.1),
        (1024, False, 0.0),
        (4096, False, 0.0),
        (1024, True, 0.0),
        (4096, True, 0.0),
    )
}
TIMES["packed_p"] = {"packed": tuple(64 + 448 * i // 63 for i in range(64)), "heads": 8, "p": 0.1, "fused": True}
PARTS = {1024: (1, 2, 8), 2048: (2, 4), 4096: (4, 8), 16384: (32,)}  # blocks that share a head, for "forced"
COMPARED = {  # the variants' cases
    "32x512": ("plain", "weights_first"),
    "8x2048": ("plain", "two_query_stages", "weights_first", "forced", "unordered"),
    "16x1024": ("forced",),
    "4x4096": ("forced",),
    "1x16384": ("plain", "forced", "unordered"),
    "8x2048_causal": ("plain", "forced"),
    "1x16384_causal": ("plain", "unordered"),
    "32x512_p": ("plain", "one_draw", "without_drawing"),
    "8x2048_p": ("one_draw", "without_drawing"),
}


def with_parts(parts: str, run: Callable[[], Any]) -> Callable[[], Any]:
    def told() -> Any:
        os.environ["PARTS"] = parts
        return run()

    return told


def timed(name: str) -> str:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = TIMES[name]
    problem, q, k, v, dout, *gradients = make(case, dirty=False)
    pairs = sum(n**2 for n in case["packed"]) if "packed" in case else case["dense"][0] * case["dense"][1] ** 2
    flops = 10 * pairs * 8 * DIM // (2 if case.get("causal") else 1)
    arguments = (dout, q, k, v, *some_statistics(q, problem), problem, *gradients)
    functions = {"base": Backward().prepare(*arguments)}
    if "dense" in case:
        inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            options = {"dropout_p": case["p"], "is_causal": case["causal"]}
            result = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
        gradient = dout.transpose(1, 2)
        functions["cudnn"] = lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
    for variant in COMPARED.get(name, ()):
        for parts in PARTS[case["dense"][1]] if variant == "forced" else ("",):
            if (WORK / f"wide_{variant}.so").exists():
                functions[f"{variant}{parts}"] = with_parts(str(parts), Backward(variant).prepare(*arguments))
    results = milliseconds(functions, eager=("cudnn",))
    text = "  ".join(f"{who} {flops / ms / 1e9:.0f}" for who, ms in results.items())
    ratio = f"x{results['cudnn'] / results['base']:.2f}" if "cudnn" in results else ""
    return f"{name:16} {results['base']:.3f} ms {ratio:6} TFLOP/s: {text}"


# ---- processes ------------------------------------------------------------------------------------------------------


def in_process(kind: str, names: list[str], limit: float, deadline: float, say: Callable[[str], None]) -> None:
    """Says the cases' lines as they come; one that takes longer than ``limit`` seconds is left out."""
    environment = dict(os.environ, PYTHONPATH=f"{WORK / 'lib'}:{os.environ.get('PYTHONPATH', '')}")
    attempts = 0
    while names and attempts < 4 and time.time() < deadline:
        attempts += 1
        command = [sys.executable, __file__, "--child", kind, *names]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        assert process.stdout is not None
        rest, until = b"", time.time() + limit + 6.0  # torch starts
        while time.time() < min(until, deadline):
            if not select.select([process.stdout], [], [], 0.2)[0]:
                continue
            new = os.read(process.stdout.fileno(), 1 << 16)
            if not new:
                break
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith("RESULT "):
                    names, until = names[1:], time.time() + limit
                    text = json.loads(text[7:])
                say(text)
        process.kill()
        process.wait()
        if names:
            say(f"LOST {names[0]} (exit {process.returncode})")
            names = names[1:]


def race() -> None:
    """One small call of each kernel, for compute-sanitizer's racecheck: every lane arrives at barriers."""
    import torch

    lay_package()
    if not (WORK / "wide_every_lane.so").exists():
        process = compile_variant("every_lane", [ONLY_BF16], "-DFASTTFM_EVERY_LANE_ARRIVES")
        print(process.communicate()[0][-400:])
    for causal, p in itertools.product((False, True), (0.0, 0.1)):
        problem, q, k, v, dout, *gradients = make({"dense": (2, 320), "heads": 2, "causal": causal, "p": p})
        Backward("every_lane").prepare(dout, q, k, v, *some_statistics(q, problem), problem, *gradients)()
        torch.cuda.synchronize()
        print(f"causal {causal}, p {p}: ran", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("checks", "stress", "times"))
    parser.add_argument("--cases", default="", help="comma-separated names; all by default")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names")
    parser.add_argument("--output", default=os.environ.get("OUT", str(WORK)))
    parser.add_argument("--racecheck", action="store_true", help="one small call of each kernel, for compute-sanitizer")
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    if arguments.racecheck:
        sys.path.insert(0, str(WORK / "lib"))
        race()
        return
    if arguments.child:
        kind, *names = arguments.child
        function = {"checks": check, "stress": stressed, "times": timed}[kind]
        for name in names:
            print("RESULT " + json.dumps(function(name)), flush=True)
        return
    begin = time.time()
    output = Path(arguments.output) / "hopper_backward_wide.txt"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("")

    def say(text: str) -> None:
        with output.open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)

    say(build([name for name in arguments.variants.split(",") if name]))
    chosen = [name for name in arguments.cases.split(",") if name]
    for kind, cases, seconds in (("checks", CHECKS, 16.0), ("times", TIMES, 24.0), ("stress", STRESS, 11.0)):
        if arguments.only in (None, kind):
            names = [name for name in cases if not chosen or name in chosen]
            in_process(kind, names, 5.0, time.time() + seconds, say)
    say(f"{time.time() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
