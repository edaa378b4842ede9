"""Checks and times the Hopper backward of attention where lengths differ: heads handed out, the longest first.

    python benchmarks/lab/hopper_backward_packed.py [--output DIRECTORY] [--seconds 50]

Checks are those of hopper_backward.py (with sums of columns) and of hopper_backward_wide.py, while racecheck runs
beside them. Then times: the new form, variants that leave a part of it out, other sources (before/NAME.cu and
before/wide/NAME.cu) and torch's kernels take turns; "bits" says whether the other sources' gradients are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import hopper_backward
import hopper_backward_wide
from hopper_backward import BEFORE, ONLY_ALL_KEYS, WORK, Report, in_process, racecheck
from hopper_backward_cases import CHECKS, make

VARIANTS: dict[str, list[tuple[str, str]]] = {
    "fixed": [("p.taken = has_lengths(call) ?", "p.taken = false ?")],  # shares, back and forth, the longest first
    "as_given": [("  p.order = order_in(call, kMostBlocks);\n", "")],  # handed out in the order of the sequences
    "all_keys": [("{ return first_key() < unit().k.length; }", "{ return true; }")],  # of those too that are none
}
CHECKED = (
    *("64", "512_p", "lengths", "packed", "many", "causal_p", "cross", "cross_p", "odd", "odd_p", "odd_causal"),
    *("odd_lengths", "2000_p", "long_packed", "long_cross", "mixed", "packed/2", "lengths/8", "packed/4", "cross/4"),
)
CHECKED_WIDE = ("packed", "odd_p", "odd_lengths", "long_packed")
RACES = ("odd_p", "odd_lengths")
RACED = WORK / "raced"  # there when racecheck has ended


def spread(sequences: int, least: int, most: int) -> tuple[int, ...]:
    return tuple(least + (most - least) * i // (sequences - 1) for i in range(sequences))


def shuffled(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(random.Random(0).sample(lengths, len(lengths)))


MEDIUM, SHORT = spread(64, 64, 512), spread(128, 32, 256)
TIMES: dict[str, dict[str, Any]] = {
    "packed": {"packed": shuffled(MEDIUM)},
    "packed_p": {"packed": shuffled(MEDIUM), "p": 0.1},
    "32x512": {"dense": (32, 512)},
    "32x512_p": {"dense": (32, 512), "p": 0.1},
    "packed_rising": {"packed": MEDIUM},
    "packed_causal": {"packed": shuffled(MEDIUM), "causal": True},
    "packed_short": {"packed": shuffled(SHORT)},
    "8x2048": {"dense": (8, 2048)},
    "packed_long": {"packed": shuffled(spread(16, 128, 2048))},
}
WIDE = {"wide:packed": TIMES["packed"], "wide:32x512": TIMES["32x512"]}  # 8 heads of 128
MEASURED = {
    "packed": ("fixed", "as_given", "all_keys"),
    "packed_p": ("fixed", "all_keys"),
}


def build() -> list[str]:
    hopper_backward.lay_package()
    begin, lines = time.time(), []
    before = Path(__file__).with_name("before")
    started = [("backward", hopper_backward.compile_variant("backward", hopper_backward.FORCED))]
    started += [("wide", hopper_backward_wide.compile_variant("base", [hopper_backward_wide.ONLY_BF16]))]
    for name in BEFORE:
        started += [(name, hopper_backward.compile_source(name, before / f"{name}.cu"))]
        started += [(f"wide {name}", hopper_backward.compile_source(f"wide_{name}", before / "wide" / f"{name}.cu"))]
    for name, changes in VARIANTS.items():
        started += [(name, hopper_backward.compile_variant(name, [*changes, *ONLY_ALL_KEYS]))]
    flag = " -DFASTTFM_SANITIZE_GPU"
    started += [("racecheck", hopper_backward.compile_variant("racecheck", hopper_backward.FORCED, flag))]
    for name, process in started:
        log, _ = process.communicate()
        if process.returncode:
            sys.exit(log + f"{name}: nvcc failed")
        spills = sum("spill stores" in line and " 0 bytes spill stores" not in line for line in log.splitlines())
        lines.append(f"{name}: {time.time() - begin:.0f} s, spills {spills}, serialized {log.count('serialized')}")
    return lines


def peer(case: dict[str, Any], problem: Any, q: Any, k: Any, v: Any, dout: Any) -> tuple[str, Any]:
    """torch's backward of the same: varlen_attn's, or cuDNN's of dense sequences."""
    import inspect

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    mask: dict[str, Any]
    if problem.packed:
        from torch.nn.attention.varlen import varlen_attn

        starts, longest, causal = problem.cu_seqlens, problem.max_seqlen, bool(case.get("causal"))
        windowed = "window_size" in inspect.signature(varlen_attn).parameters
        mask = {"window_size": (-1, 0 if causal else -1)} if windowed else {"is_causal": causal}
        out = varlen_attn(query, key, value, starts, starts, longest, longest, **mask)
    else:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            query, key, value = (x.transpose(1, 2) for x in inputs)
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=case.get("p", 0.0))
        out = out.transpose(1, 2)
    return ("varlen" if problem.packed else "cudnn"), lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def timed(name: str) -> str:
    import torch

    from fasttfm.kernels.attention import reference

    head_dim = 128 if name in WIDE else 64
    case = {"heads": 1024 // head_dim, "fused": True, **(WIDE | TIMES)[name]}
    problem, q, k, v, dout, *gradients = make(case, dirty=False, head_dim=head_dim)
    out, lse = reference.attention_forward(q, k, v, problem._replace(seed=None, threshold=0, dropout_scale=1.0))

    def prepared(who: str, into: Any, **options: Any) -> Any:
        if head_dim == 128:
            form: Any = hopper_backward_wide.Backward("base" if who == "backward" else who)
        else:
            form = hopper_backward.Backward(who, **options)
        return form.prepare(dout, q, k, v, out, lse, problem, *into)

    functions, others = {"new": prepared("backward", gradients)}, {}
    for who in BEFORE:
        others[who] = make(case, dirty=False, head_dim=head_dim)[5:]
        functions[who] = prepared(who, others[who])
    functions |= {who: prepared(who, gradients) for who in MEASURED.get(name, ())}
    if name == "packed_p":
        columns = torch.empty(3, case["heads"], head_dim, device="cuda")
        functions["columns"] = prepared("backward", gradients, columns=columns)
    if not (problem.packed and case.get("p")):
        kind, run = peer(case, problem, q, k, v, dout)
        functions[kind] = run
    hanging = os.environ.get("HANGS", "").split()
    functions = {who: run for who, run in functions.items() if who not in hanging}
    results = hopper_backward.milliseconds(functions, eager=("varlen", "cudnn"))
    functions["new"]()
    same = [all(torch.equal(a, b) for a, b in zip(gradients, other, strict=True)) for other in others.values()]
    text = "  ".join(f"{who} {ms:.3f}" for who, ms in results.items())
    return f"{name:16} {text}  bits {same}"


def wait(name: str) -> str:
    """Times are measured when nothing else runs."""
    begin = time.time()
    while not RACED.exists():
        time.sleep(0.1)
    return f"{name} waited for {time.time() - begin:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default=os.environ.get("OUT", str(WORK)))
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--build", action="store_true", help="no more than that")
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    if arguments.child:
        functions = {"checks": hopper_backward.check, "wide checks": hopper_backward_wide.check, "times": timed}
        functions |= {"races": hopper_backward.once, "wait": wait}
        for case in arguments.child:
            kind, name = case.split(":", 1)
            print("RESULT " + json.dumps(functions[kind](name)), flush=True)
        return
    begin = time.time()
    lines = Report(Path(arguments.output) / "hopper_backward_packed.txt")
    for line in build():
        lines.append(line)
    if arguments.build:
        return
    end = begin + arguments.seconds
    assert all(name in CHECKS for name in (*CHECKED, *RACES))
    RACED.unlink(missing_ok=True)

    def race() -> None:
        names = [f"races:{name}" for name in RACES]
        in_process(names, 12.0, min(end, time.time() + 22), lines, racecheck(), __file__)
        RACED.touch()

    races = threading.Thread(target=race)
    races.start()
    names = [*(f"checks:{name}" for name in CHECKED), *(f"wide checks:{name}" for name in CHECKED_WIDE), "wait:times"]
    names += [f"times:{name}" for name in (*TIMES, *WIDE)]
    in_process(names, 15.0, end, lines, script=__file__)
    races.join()
    if any(line.startswith(("BAD", "LOST")) for line in lines):
        lines.append("FAILED")
    lines.append(f"{time.time() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
