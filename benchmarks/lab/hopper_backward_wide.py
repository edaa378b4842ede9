"""Checks and times the Hopper backward of attention at head dim 128 by itself, through libraries of its sources alone.

    python benchmarks/lab/hopper_backward_wide.py [--only KINDS] [--cases NAMES] [--output DIRECTORY] [--seconds N]

checks hold it against reference.py in fp64 (same dropout) and repeat it for the same bits; stress repeats large cases;
times stand next to cuDNN's and those of variants of the source and of other ones (before/wide_*.cu beside this script),
by turns; clocks say where a step's cycles go, and how long products take by themselves. All run in a process of their
own with a time limit. ``--only races`` compiles what ``compute-sanitizer --tool racecheck python ... --racecheck``
runs.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hopper_backward
import hopper_backward_wide_clocks as clocks
from hopper_backward import ROOT, WORK, lay_package, milliseconds, relative, repeat
from hopper_backward_cases import COMMON
from hopper_backward_cases import make as make_problem

DIM = 128

WRAPPER = """
extern "C" int backward(const fasttfm::AttentionBackward* call, const char** detail) {
  const fasttfm::Status status = fasttfm::cuda::attention_backward_d128(*call);
  *detail = status.detail;
  return static_cast<int>(status.code);
}
extern "C" int64_t workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen_k) {
  return fasttfm::cuda::attention_backward_d128_workspace(sequences, heads, tokens, max_seqlen_k);
}
"""

# Changes of the source whose times are compared: text to replace, and what stands there instead. Those
# "without" something compute nonsense: they show what the work costs.
FORCED = ("  return best;\n", '  return std::min<int64_t>(key_tiles, atoi(getenv("PARTS")));\n')
VARIANTS: dict[str, list[tuple[str, str]]] = {
    "no_turns": [
        ("{ named_barrier_sync(kTurns + number, 2 * kWarpgroup); }", "{ named_barrier_sync(1 + number, kWarpgroup); }"),
        ("{ named_barrier_arrive(kTurns + 1 - number, 2 * kWarpgroup); }", "{}"),
    ],
    "forced": [FORCED],
    "together": [("spread = !CAUSAL && parts", "spread = !CAUSAL && parts < 0 && parts")],
    "without_draws": [
        (
            "draw_weights(seed, unit.sequence, unit.head, query + j / 2 * 8 + j % 2, block, d)",
            "Draw{{query + j, block, static_cast<uint32_t>(seed), query * block + d}}",
        ),
    ],
    "without_exp": [
        ("exp2_approx(pair[0] * p.score_scale - lse.x)", "(pair[0] * p.score_scale - lse.x)"),
        ("exp2_approx(pair[1] * p.score_scale - lse.y)", "(pair[1] * p.score_scale - lse.y)"),
    ],
}
CAUSAL_TOO = ("forced",)
DROPOUT_ALONE = ("without_draws",)
# Other sources whose times are compared, where they are there.
BEFORE = Path(__file__).with_name("before")
OTHERS = [path.stem.removeprefix("wide_") for path in sorted(BEFORE.glob("wide_*.cu"))]
WITHOUT_HALF = (": call.dtype == DType::f16 ? launch_d128<f16_t>(call, p)", "")
WITHOUT_BFLOAT = ("call.dtype == DType::bf16  ? launch_d128<bf16_t>(call, p)\n         : ", "")
WITHOUT_DROPOUT = (
    "  if (call.seed != nullptr)\n"
    "    return causal ? start(backward_kernel_d128<T, true, true>) : start(backward_kernel_d128<T, true, false>);\n",
    "",
)
ONLY_DROPOUT = (
    "  return causal ? start(backward_kernel_d128<T, false, true>) : start(backward_kernel_d128<T, false, false>);\n",
    "  return {};\n",
)
ONLY_ALL_KEYS = (
    "  return causal ? start(backward_kernel_d128<T, false, true>) : start(backward_kernel_d128<T, false, false>);\n",
    "  (void)causal;\n  return start(backward_kernel_d128<T, false, false>);\n",
)
SOURCE = "attention/hopper/backward_d128.cu"


def inlined(name: str, seen: set[str]) -> str:
    """A source file with the kernel's own headers in the place of their first includes."""

    def header(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return inlined(match[1], seen).replace("#pragma once\n", "")

    return re.sub(
        r'#include "(attention/hopper/backward_d128_\w+\.cuh)"\n', header, (ROOT / "kernels" / name).read_text()
    )


def compile_variant(
    name: str, changes: list[tuple[str, str]], flags: str = "", source: Path | None = None
) -> subprocess.Popen[str]:
    kernel = inlined(SOURCE, set()) if source is None else source.read_text()
    for old, new in changes:
        if old not in kernel:
            print(f"{name}: the source has no {old!r}")
        kernel = kernel.replace(old, new)
    (WORK / f"wide_{name}.cu").write_text(kernel + WRAPPER)
    command = f"nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I{ROOT}/kernels -Xptxas=-v -shared {flags}"
    command += f" -Xcompiler -fPIC {WORK}/wide_{name}.cu -o {WORK}/wide_{name}.so"
    return subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_all(kinds: list[str], names: list[str]) -> dict[str, subprocess.Popen[str]]:
    """Compiles what these kinds of cases need."""
    lay_package()
    started = {
        "base": compile_variant("base", [WITHOUT_HALF, WITHOUT_DROPOUT]),
        "base_p": compile_variant("base_p", [WITHOUT_HALF, ONLY_DROPOUT]),
    }
    if "checks" in kinds:
        started["half_p"] = compile_variant("half_p", [WITHOUT_BFLOAT, ONLY_DROPOUT])
    if "times" in kinds:
        for name in names:
            few = [WITHOUT_HALF, WITHOUT_DROPOUT, *([ONLY_ALL_KEYS] if name not in CAUSAL_TOO else [])]
            if name in DROPOUT_ALONE:
                started[name] = compile_variant(f"{name}_p", [*VARIANTS[name], WITHOUT_HALF, ONLY_DROPOUT])
            else:
                started[name] = compile_variant(name, [*VARIANTS[name], *few])
        for name in OTHERS:
            source = BEFORE / f"wide_{name}.cu"
            started[name] = compile_variant(name, [WITHOUT_HALF, WITHOUT_DROPOUT], source=source)
            if name == "main":
                started["main_p"] = compile_variant("main_p", [WITHOUT_HALF, ONLY_DROPOUT], source=source)
    if "clocks" in kinds:
        few = [WITHOUT_HALF, WITHOUT_DROPOUT, ONLY_ALL_KEYS]
        started["clocks"] = compile_variant("clocks", [*clocks.changes(), *few])
        started["rates"] = clocks.compile_rates(WORK)
    if "races" in kinds:
        for name, few in (("every_lane", WITHOUT_DROPOUT), ("every_lane_p", ONLY_DROPOUT)):
            started[name] = compile_variant(name, [WITHOUT_HALF, few], "-DFASTTFM_SANITIZE_GPU")
    return started


def build(kinds: list[str], names: list[str]) -> str:
    begin = time.time()
    lines = []
    for name, process in start_all(kinds, names).items():
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

LONG = ("4000", "4000_causal", "long_cross")  # repeated more often


make = functools.partial(make_problem, head_dim=DIM)


class Backward(hopper_backward.Backward):
    """A variant; with and without dropout it has libraries of its own, which compile at the same time."""

    def __init__(self, case: dict[str, Any], variant: str = "base") -> None:
        self.open(WORK / f"wide_{variant}{'_p' if case.get('p') else ''}.so")


def check(name: str) -> str:
    import torch

    from fasttfm.kernels.attention import reference

    torch.manual_seed(len(name) * 1000 + sum(map(ord, name)))
    problem, q, k, v, dout, *gradients = make(CHECKS[name])
    exact = [x.double() for x in (q, k, v, dout)]
    out, lse = reference.attention_forward(*exact[:3], problem)
    backward = Backward(CHECKS[name], "half" if CHECKS[name].get("half") else "base")
    run = backward.prepare(dout, q, k, v, out.to(q.dtype), lse.float(), problem, *gradients)
    run()
    torch.cuda.synchronize()
    expected = [torch.empty(x.shape, dtype=torch.float64, device="cuda") for x in gradients]
    reference.attention_backward(exact[3], *exact[:3], out, lse, problem, *expected)
    rows = slice(None) if problem.cu_seqlens is None else slice(0, -3)
    errors = [relative(a[rows], b[rows]) for a, b in zip(gradients, expected, strict=True)]
    past = problem.packed and any(not x[-3:].isnan().all() for x in gradients)
    differences = repeat(run, gradients, [rows] * 3, 150 if name in LONG else 30)
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
    run = Backward(STRESS[name]).prepare(dout, q, k, v, *some_statistics(q, problem), problem, *gradients)
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
        (2048, False, 0.0),
        (16384, True, 0.0),
        (16384, False, 0.0),
        (4096, False, 0.0),
        (512, False, 0.0),
        (1024, False, 0.0),
        (256, False, 0.0),
        (128, False, 0.0),
        (2048, True, 0.0),
        (512, True, 0.0),
        (512, False, 0.1),
        (2048, False, 0.1),
        (4096, True, 0.0),
        (1024, True, 0.0),
        (256, False, 0.1),
        (128, False, 0.1),
    )
}
TIMES["packed_p"] = {"packed": tuple(64 + 448 * i // 63 for i in range(64)), "heads": 8, "p": 0.1, "fused": True}
PARTS = {512: (1, 2), 1024: (2, 4), 2048: (4, 8), 4096: (8, 16), 16384: (16, 32)}  # for "forced"
COMPARED = {  # the variants' cases
    "8x2048": ("no_turns", "together", "forced", "without_exp"),
    "1x16384": ("no_turns", "together", "forced"),
    "4x4096": ("no_turns", "together", "forced"),
    "32x512": ("no_turns", "together", "forced"),
    "16x1024": ("no_turns", "together", "forced"),
    **{f"{16384 // size}x{size}_causal": ("forced",) for size in PARTS},
    "32x512_p": ("without_draws",),
    "8x2048_p": ("without_draws",),
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
    functions = {"base": Backward(case).prepare(*arguments)}
    if "main" in OTHERS:
        functions["main"] = Backward(case, "main").prepare(*arguments)
    if "dense" in case:
        inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            options = {"dropout_p": case["p"], "is_causal": case["causal"]}
            result = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
        gradient = dout.transpose(1, 2)
        functions["cudnn"] = lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
    for variant in COMPARED.get(name, ()):
        for parts in PARTS[case["dense"][1]] if variant == "forced" else ("",):
            if (WORK / f"wide_{variant}{'_p' if case['p'] else ''}.so").exists():
                functions[f"{variant}{parts}"] = with_parts(str(parts), Backward(case, variant).prepare(*arguments))
    functions = {who: run for who, run in functions.items() if who not in os.environ.get("HANGS", "").split()}
    results = milliseconds(functions, eager=("cudnn",))
    text = "  ".join(f"{who} {ms:.3f}" for who, ms in results.items())
    ratios = [f"{results[who] / results['base']:.2f}x {who}" for who in ("cudnn", "main") if who in results]
    return f"{name:15} {flops / results['base'] / 1e9:.0f} TFLOP/s, {', '.join(ratios)}; ms: {text}"


# ---- processes ------------------------------------------------------------------------------------------------------


def in_process(names: list[str], limit: float, deadline: float, say: Callable[[str], None]) -> None:
    """Says the lines of cases, kind:name, as they come; one that takes more than ``limit`` seconds is left out."""
    environment = dict(os.environ, PYTHONPATH=f"{WORK / 'lib'}:{os.environ.get('PYTHONPATH', '')}")
    attempts = 0
    while names and attempts < 4 and time.time() < deadline:
        attempts += 1
        command = [sys.executable, __file__, "--child", *names]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        assert process.stdout is not None
        rest, until = b"", time.time() + limit + 8.0  # torch starts
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
                    say(json.loads(text[7:]))
                elif not text.startswith("~ "):
                    say("    | " + text)
        process.kill()
        process.wait()
        if names:
            say(f"LOST {names[0]} (exit {process.returncode}) {rest.decode(errors='replace')}")
            if rest.startswith(b"~ "):  # who was to run when nothing came
                environment["HANGS"] = environment.get("HANGS", "") + " " + rest.decode().split()[-1]
            names = names[1:]


def race() -> None:
    """One small call of each kernel, for compute-sanitizer's racecheck: every lane arrives at barriers."""
    import torch

    for causal, p in itertools.product((True, False), (0.0, 0.1)):
        case = {"dense": (2, 320), "heads": 2, "causal": causal, "p": p}
        problem, q, k, v, dout, *gradients = make(case)
        Backward(case, "every_lane").prepare(dout, q, k, v, *some_statistics(q, problem), problem, *gradients)()
        torch.cuda.synchronize()
        print(f"causal {causal}, p {p}: ran", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help="comma-separated kinds")
    parser.add_argument("--cases", default="", help="comma-separated names; all by default")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names")
    parser.add_argument("--seconds", type=float, default=45.0, help="room for all")
    parser.add_argument("--output", default=os.environ.get("OUT", str(WORK)))
    parser.add_argument("--racecheck", action="store_true", help="a call of each kernel; after --only races")
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    if arguments.racecheck:
        sys.path.insert(0, str(WORK / "lib"))
        race()
        return
    if arguments.child:
        for case in arguments.child:
            kind, name = case.split(":")
            print("RESULT " + json.dumps(KINDS[kind][0](name)), flush=True)
        return
    begin = time.time()
    output = Path(arguments.output) / "hopper_backward_wide.txt"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("")

    def say(text: str) -> None:
        with output.open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)

    kinds = arguments.only.split(",")
    say(build(kinds, [name for name in arguments.variants.split(",") if name]))
    chosen = [name for name in arguments.cases.split(",") if name]
    cases = [f"{kind}:{name}" for kind in kinds for name in KINDS[kind][1] if not chosen or name in chosen]
    in_process(cases, 5.0, begin + arguments.seconds, say)
    say(f"{time.time() - begin:.0f} s in all")


def clocked(name: str) -> str:
    if name == "rates":
        return clocks.rates(WORK)
    case, _, variant = name.partition("/")
    problem, q, k, v, dout, *gradients = make(TIMES[case], dirty=False)
    backward = Backward({}, variant)
    backward.prepare(dout, q, k, v, *some_statistics(q, problem), problem, *gradients)()
    return f"{name}{clocks.report(backward.library)}"


CLOCKED = ("8x2048/clocks", "rates")
KINDS: dict[str, tuple[Callable[[str], str], Iterable[str]]] = {
    "checks": (check, CHECKS),
    "clocks": (clocked, CLOCKED),
    "times": (timed, TIMES),
    "stress": (stressed, STRESS),
    "races": (str, ()),  # compiled alone
}

if __name__ == "__main__":
    main()
