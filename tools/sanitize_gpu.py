"""Runs kernels under compute-sanitizer's four tools at the same time: ``python tools/sanitize_gpu.py [options]``.

Each tool checks the same tests (tools/run_tests.py runs them, in several processes per tool). ``triton`` is memcheck
for calls of Triton's kernels, and ``boundaries`` is memcheck for all kernels with boundaries that are wrong, of every
public entry point (fasttfm.testing.seams). Memcheck and initcheck must report a control, a kernel that gets a wrong
buffer: a filter that matches no kernel would find no error either. The table at the end has one row per op and tool;
the log folder receives all findings (findings.txt) and the output of the tools. The exit code is 0 if all tests ran and
passed and there are no findings.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUNNER = Path(__file__).with_name("run_tests.py")
TESTS = (
    "tests/native/under_sanitizers.py",
    "tests/test_optim.py",
    "tests/kernels/test_attention_column_sums.py::test_types",
    "tests/kernels/test_gelu_gemm.py::test_results_that_are_not_needed",
    "tests/kernels/test_gelu_gemm.py::test_strides_and_odd_addresses",
)
BOUNDARIES, TRITON = "boundaries", "triton"  # of the names that the command takes as tools
BOUNDARY_TESTS = ("tests/seams/test_seams.py",)
# Without torch's caching allocator, allocations are calls of cudaMalloc, which cannot be captured in a CUDA graph.
KEYWORD = "not graph and not captured"
# GEMMs of cuBLAS. Under racecheck a 16-bit one ends with an illegal memory access, although the filter excludes it, and
# initcheck does not see what they write by TMA, so that it reports the kernels that read their results. Those kernels
# are checked in tests of other ops: norms, attention, bias_gelu, and in test_gelu_gemm.
WITH_CUBLAS = "layers_in_one_call or layers_by_a_plan"
WITHOUT_TRITON = f"{KEYWORD} and not test_triton_kernels"
KEYWORDS = {
    "memcheck": WITHOUT_TRITON,
    "racecheck": f"{WITHOUT_TRITON} and not (linear_gelu or mlp or qkv_projection or {WITH_CUBLAS})",
    "synccheck": WITHOUT_TRITON,
    "initcheck": f"{WITHOUT_TRITON} and not (qkv_projection or {WITH_CUBLAS})",
    TRITON: f"{KEYWORD} and test_triton_kernels",
    BOUNDARIES: "test_seam_gpu and (boundaries or max_seqlen)",
}
CONTROL_SECONDS = 90
OURS = "fasttfm"  # the namespace of all kernels, and so part of their names

# initcheck has to instrument torch's kernels too, otherwise what they write would count as uninitialized; its findings
# about their own reads are ignored.
COMMON = (
    "--target-processes application-only --report-api-errors no --show-backtrace device --print-limit 100"
    " --launch-timeout 300"  # seconds until a process has started: several tools start many at once
)
TOOLS = {
    "memcheck": f"--kernel-name kns={OURS}",
    "racecheck": f"--kernel-name kns={OURS}",
    "synccheck": f"--kernel-name kns={OURS}",
    "initcheck": "",
    TRITON: "",
    BOUNDARIES: "",
}

CONTROL = """
import torch
from fasttfm import _native

rows, columns = 64, 256
x = torch.{x}(rows, columns, device="cuda")
y, statistics = torch.empty(rows * columns {missing}, device="cuda"), torch.empty(2, rows, device="cuda")
_native.core().layer_norm_forward(x, None, None, y, statistics, 1e-5)
torch.cuda.synchronize()
"""
CONTROLS = {
    "memcheck": CONTROL.format(x="ones", missing="// 2"),
    "initcheck": CONTROL.format(x="empty", missing=""),
}

# Prefixes of lines that are not findings.
NO_FINDING = (
    *("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY"),
    *("Error: process didn't", "Target application"),
)


@dataclass(frozen=True)
class Finding:
    test: str
    text: str


def findings(log: str, tool: str) -> Iterator[Finding]:
    """The errors in the output of a tool, each with the test that was running: a line whose text begins right after the
    tool's prefix, and the indented lines that follow."""
    test, block = "", []
    for line in [*log.splitlines(), "[test] "]:
        begins = line.startswith("[test] ")
        error = re.match(r"========= (?! )(.+)", line)
        if block and (begins or error):
            text = "\n".join(block)
            if tool != "initcheck" or OURS in text:
                yield Finding(test, text)
            block = []
        if begins:
            test = line.removeprefix("[test] ")
        elif error and not error[1].startswith(NO_FINDING):
            block = [line]
        elif block and line.startswith("========="):
            block.append(line)


def op_of(nodeid: str) -> str:
    """The first part of a test's parameters in under_sanitizers.py, elsewhere the file's name."""
    match = re.search(r"under_sanitizers\.py::.*?\[(?:\d+-\d+-)?([a-z]\w*)-", nodeid)
    return match[1] if match else Path(nodeid.split("::")[0]).stem.removeprefix("test_")


def command_of(tool: str) -> str:
    name = "memcheck" if tool in (BOUNDARIES, TRITON) else tool
    return f"compute-sanitizer --tool {name} {COMMON} {TOOLS[tool]}".strip()


def start(tool: str, options: argparse.Namespace, log: Path) -> subprocess.Popen[bytes]:
    keyword = KEYWORDS.get(tool, KEYWORD)
    command = [
        *(sys.executable, str(RUNNER), "-m", "gpu", "-n", str(options.processes), "--wrap", command_of(tool)),
        *("--time-limit", str(options.time_limit), "--log", str(log / tool)),
        *("-k", f"({keyword}) and ({options.keyword})" if options.keyword else keyword),
        *(BOUNDARY_TESTS if tool == BOUNDARIES else TESTS),
    ]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # an allocation of its own for each tensor
    with (log / f"{tool}.txt").open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def reports_control(tool: str, log: Path) -> bool:
    """Whether the tool reports the control's error. A program whose CUDA context the tool has destroyed may never end,
    so that only its output up to a time limit is read."""
    command = [*command_of(tool).split(), sys.executable, "-c", CONTROLS[tool]]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    printed = log / f"control-{tool}.txt"
    with printed.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(CONTROL_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return any(OURS in finding.text for finding in findings(printed.read_text(errors="replace"), tool))


def table(log: Path, tools: list[str]) -> tuple[list[str], list[str]]:
    """The rows of the table, and the text of all findings."""
    rows, texts = [f"{'op':28} {'tool':10} {'passed':>7} {'failed':>7} {'skipped':>8} {'findings':>9}"], []
    for tool in tools:
        outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        results = log / tool / "results.jsonl"
        for line in results.read_text().splitlines() if results.exists() else ():
            row = json.loads(line)
            outcomes[op_of(row["nodeid"])][row["outcome"]] += 1
        for worker in sorted((log / tool).glob("worker-*.log")):
            for finding in findings(worker.read_text(errors="replace"), tool):
                outcomes[op_of(finding.test)]["finding"] += 1
                texts.append(f"---- {tool}: {finding.test}\n{finding.text}\n")
        for op, counts in sorted(outcomes.items()):
            numbers = [counts[name] for name in ("passed", "failed", "skipped", "finding")]
            rows.append(f"{op:28} {tool:10} {numbers[0]:7d} {numbers[1]:7d} {numbers[2]:8d} {numbers[3]:9d}")
    return rows, texts


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="CUDA kernels under compute-sanitizer's tools.")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"some of {','.join(TOOLS)}")
    parser.add_argument("-k", "--keyword", default="", help="pytest's -k")
    parser.add_argument("-n", "--processes", type=int, default=max((os.cpu_count() or 1) // 4, 1), help="per tool")
    parser.add_argument("--time-limit", type=float, default=420.0, help="seconds")
    parser.add_argument("--log", default="build/sanitized/log", help="folder for the log; emptied first")
    options = parser.parse_args(arguments)
    tools, log = options.tools.split(","), Path(options.log).resolve()
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    running = {tool: start(tool, options, log) for tool in tools}
    blind = [tool for tool in tools if tool in CONTROLS and not reports_control(tool, log)]
    codes = {tool: process.wait() for tool, process in running.items()}
    rows, texts = table(log, tools)
    (log / "findings.txt").write_text("\n".join(texts))
    (log / "table.txt").write_text("\n".join(rows) + "\n")
    for tool in tools:
        print(f"\n======== {tool}", *(log / f"{tool}.txt").read_text(errors="replace").splitlines()[-25:], sep="\n")
    print("\n======== findings", *texts[:40], "", *rows, "", sep="\n")
    for tool in blind:
        print(f"{tool} does not notice a wrong buffer: see control-{tool}.txt")
    print(f"{len(texts)} findings; exit codes of the tests: {codes}")
    return int(bool(texts or blind or any(codes.values())))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
