"""Shapes of Hopper's attention forward at head dim 128: what hopper_backward_wide.py runs as its kind ``forward``."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hopper_forward
from hopper_forward import Case, Kernel, Mode, Shape

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Form(Shape):
    apart: bool = False  # a tile's last product comes before the next tile, whatever there is room for

    def __str__(self) -> str:
        return f"{64 * self.groups}x{self.keys}_{self.stages}{'_turns' * self.turns}{'_apart' * self.apart}"

    @property
    def library(self) -> Path:
        return hopper_forward.WORK / f"wide_{self}.so"


FORMS = {
    "now": Form(128, 2, 128, 2),
    "64 keys": Form(128, 2, 64, 4, dropout=False),
    "64 keys apart": Form(128, 2, 64, 4, dropout=False, apart=True),
}
CHECKED = [
    Case(6 if layout == "packed" else 2, 200, 2, 128, causal, p, layout)
    for causal in (False, True)
    for p in (0.0, 0.1)
    for layout in ("fused", "lengths", "packed")
] + [
    Case(9, 1000, 16, 128, True, Sk=250),
    Case(2, 70, 2, 128, True, Sk=333),
    Case(6, 512, 4, 128, True, 0.1, "packed", Hk=2),
    Case(16, 256, 16, 128, gain=4.0),
]
LOADED = [Case(40, 512, 8, 128, True, 0.0, "packed"), Case(24, 500, 8, 128)]
TIMES = [Case(16384 // S, S, 8, 128) for S in (512, 256, 1024)]
TIMES += [Case(32, 512, 8, 128, True)]
CASES = [*(f"check {name}" for name in FORMS), *map(str, TIMES)]


def start_all() -> dict[str, subprocess.Popen[str]]:
    return {f"forward {name}": start(form) for name, form in FORMS.items()}


def start(form: Form) -> subprocess.Popen[str]:
    """Compiles a form, from a copy of the header that says whether tiles overlap if that is to be changed."""
    hopper_forward.WORK.mkdir(exist_ok=True)
    include = [str(ROOT / "kernels")]
    if form.apart:
        header = hopper_forward.WORK / "apart" / "attention" / "cuda_tiles.cuh"
        header.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / "kernels" / "attention" / "cuda_tiles.cuh").read_text()
        assert "kOverlaps = STAGES > 2;" in text
        header.write_text(text.replace("kOverlaps = STAGES > 2;", "kOverlaps = false;"))
        include.insert(0, str(header.parents[1]))
    definitions = {"HEAD_DIM": form.D, "GROUPS": form.groups, "KEYS": form.keys, "STAGES": form.stages}
    definitions |= {"TURNS": int(form.turns), "DROPOUT": int(form.dropout)}
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-shared"]
    command += ["-Xcompiler=-fPIC", *(f"-DLAB_{name}={value}" for name, value in definitions.items())]
    command += [*(f"-I{path}" for path in include), "-o", str(form.library)]
    command.append(str(ROOT / "benchmarks" / "lab" / "hopper_forward.cu"))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def checked(form: Form) -> str:
    hopper_forward.check_cases = lambda D, short: CHECKED
    hopper_forward.load_cases = lambda shape: LOADED
    return "; ".join(hopper_forward.check(form, False)) or "ok"


def timed(case: Case) -> str:
    import torch.nn.functional as F
    from hopper_backward import milliseconds
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, problem = hopper_forward.make(case)
    tensors = (q, k, v, *hopper_forward.outputs(q, problem))
    uneven = case.causal or case.layout == "packed"
    mode = Mode(uneven, 1 if case.layout == "packed" else 64 if case.causal else 4)
    functions: dict[str, Any] = {}
    for name, form in FORMS.items():
        if form.takes(case):
            kernel = Kernel(form)
            functions[name] = lambda kernel=kernel: kernel(tensors, problem, mode)
    if case.layout != "packed":
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))

        def cudnn() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal, dropout_p=case.p)

        functions["cudnn"] = cudnn
    found = milliseconds(functions)
    ratios = ", ".join(f"{found[who] / found['now']:.2f}x {who}" for who in ("cudnn",) if who in found)
    times = "  ".join(f"{name} {1e3 * ms:.1f}" for name, ms in found.items())
    return f"forward {case}: {case.flops / found['now'] * 1e-9:.0f} TFLOP/s, {ratios}; us: {times}"


def run(name: str) -> str:
    if name.startswith("check "):
        return f"forward {name}: {checked(FORMS[name[6:]])}"
    return timed(next(case for case in TIMES if str(case) == name))
