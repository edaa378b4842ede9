"""tools/sanitize_gpu.py: which lines of compute-sanitizer's output are findings, and of which test."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

LOG = """========= COMPUTE-SANITIZER

[test] tests/native/under_sanitizers.py::test_on_a_gpu[layer_norm-typical]
.
[test] tests/native/under_sanitizers.py::test_on_a_gpu[layer_norm-odd]
========= Invalid __global__ write of size 4 bytes
=========     at void fasttfm::cuda::forward_kernel<float>(Parameters)+0x10
=========     by thread (0,0,0) in block (1,0,0)
=========
========= Invalid __global__ write of size 4 bytes
=========     at void fasttfm::cuda::forward_kernel<float>(Parameters)+0x20
.
[test] tests/test_optim.py::test_a_step_on_a_gpu[None]
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<4>(int)+0x20
.
========= ERROR SUMMARY: 3 errors
"""


@pytest.fixture(scope="module")
def tool() -> Any:
    path = Path(__file__).parents[2] / "tools" / "sanitize_gpu.py"
    spec = importlib.util.spec_from_file_location("sanitize_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_findings_belong_to_the_test_that_was_running(tool: Any) -> None:
    odd = "tests/native/under_sanitizers.py::test_on_a_gpu[layer_norm-odd]"
    found = list(tool.findings(LOG, "memcheck"))
    assert [each.test for each in found] == [odd, odd, "tests/test_optim.py::test_a_step_on_a_gpu[None]"]
    assert "block (1,0,0)" in found[0].text
    assert "+0x20" in found[1].text
    assert [each.test for each in tool.findings(LOG, "initcheck")] == [odd, odd]
    assert not list(tool.findings("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors", "memcheck"))
    race = "========= Error: Race reported between Write access at fasttfm::cuda::f()+0x5 and Read access\n"
    assert len(list(tool.findings(race, "racecheck"))) == 1


@pytest.mark.parametrize(
    ("nodeid", "op"),
    [
        ("tests/native/under_sanitizers.py::test_on_a_gpu[gelu_layer_norm-odd]", "gelu_layer_norm"),
        ("tests/native/under_sanitizers.py::test_attention[attention-long-64-True-0.1]", "attention"),
        ("tests/native/under_sanitizers.py::test_attention_with_many_heads[5-256-attention-causal]", "attention"),
        ("tests/native/under_sanitizers.py::test_gelu_gemm[gelu_gemm-300-200]", "gelu_gemm"),
        ("tests/native/under_sanitizers.py::test_fp8_cast[127-72]", "under_sanitizers"),
        ("tests/test_optim.py::test_a_step_on_a_gpu[None]", "optim"),
    ],
)
def test_ops(tool: Any, nodeid: str, op: str) -> None:
    assert tool.op_of(nodeid) == op


def test_the_table_counts_tests_and_findings(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "memcheck").mkdir()
    (tmp_path / "memcheck" / "worker-0.log").write_text(LOG)
    row = {"nodeid": "tests/native/under_sanitizers.py::test_on_a_gpu[layer_norm-odd]", "outcome": "passed"}
    (tmp_path / "memcheck" / "results.jsonl").write_text(json.dumps(row) + "\n")
    rows, texts = tool.table(tmp_path, ["memcheck"])
    assert rows[1].split() == ["layer_norm", "memcheck", "1", "0", "0", "2"]
    assert len(texts) == 3


def test_some_tools_skip_the_ops_that_call_cublas(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(tool.subprocess, "Popen", lambda command, **_: commands.append(command))
    for name in tool.TOOLS:
        tool.start(name, argparse.Namespace(processes=1, time_limit=1.0, keyword="mlp or gelu_gemm"), tmp_path)
    keywords = {name: command[command.index("-k") + 1] for name, command in zip(tool.TOOLS, commands, strict=True)}
    asked = " and (mlp or gelu_gemm)"
    assert keywords == {name: f"({tool.KEYWORDS[name]}){asked}" for name in tool.TOOLS}
    left_out = {name: keyword.removesuffix(asked) for name, keyword in keywords.items()}
    assert {name for name, keyword in left_out.items() if "mlp" in keyword} == {"racecheck"}
    assert {name for name, keyword in left_out.items() if "qkv_projection" in keyword} == {"racecheck", "initcheck"}
    assert left_out["memcheck"] == left_out["synccheck"]
    assert all("--launch-timeout" in tool.command_of(name) for name in tool.TOOLS)


def test_wrong_boundaries_run_under_memcheck_with_all_kernels(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(tool.subprocess, "Popen", lambda command, **_: commands.append(command))
    tool.start("boundaries", argparse.Namespace(processes=1, time_limit=1.0, keyword=""), tmp_path)
    (command,) = commands
    assert command[-1] == "tests/seams/test_seams.py"
    assert command[command.index("-k") + 1] == "test_seam_gpu and (boundaries or max_seqlen)"
    wrap = command[command.index("--wrap") + 1]
    assert "--tool memcheck" in wrap
    assert "--kernel-name" not in wrap
