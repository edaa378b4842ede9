"""benchmarks/inference_soak.py: it passes with a good session, and its checks find a bad one."""

from __future__ import annotations

import os
import runpy
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm.generate import GenerationSession
from fasttfm.inference.network import Inputs, Network, Output
from fasttfm.ops import fp8

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "inference_soak.py"))


@pytest.fixture(scope="module")
def soak() -> Any:
    return SCRIPT["make"](torch.device("cpu"), "tiny", 6)


def fresh(soak: Any) -> Any:
    """The same sessions and expected results, with a few short calls."""
    contenders = [
        SCRIPT["Contender"](contender.name, contender.session, contender.expected) for contender in soak.contenders
    ]
    fresh_soak = SCRIPT["Soak"](contenders, soak.texts, soak.generation, soak.continuations)
    fresh_soak.calls = [call[:3] for call in fresh_soak.calls]
    return fresh_soak


def run(soak: Any, seconds: float) -> tuple[bool, list[dict[str, Any]]]:
    samples = SCRIPT["run"](soak, seconds, 0.05)
    good, rows = SCRIPT["report"](soak, samples)
    return good, rows


def test_good_sessions_pass(soak: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soak = fresh(soak)
    good, rows = run(soak, 1.0)
    assert good, capsys.readouterr().out
    assert "every result checked" in capsys.readouterr().out
    SCRIPT["write"](rows, torch.device("cpu"), "bert-tiny", tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.read_text().startswith("kind,calls,ms_p50,ms_p99,mib_second_third")


def test_wrong_vectors_are_found(soak: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Wrong by three times the tolerance in a single element of a few texts."""
    right, bound = Network.run, 3 * max(contender.expected.bound for contender in soak.contenders)

    def wrong(self: Network, output: Output, inputs: Inputs) -> torch.Tensor:
        rows = right(self, output, inputs).clone()
        rows[-1, 5] += bound
        return rows

    monkeypatch.setattr(Network, "run", wrong)
    good, _ = run(fresh(soak), 30.0)
    assert not good
    assert "failed: Mismatch: vectors of texts" in capsys.readouterr().out


def test_wrong_tokens_and_bits_are_found(soak: Any) -> None:
    soak = fresh(soak)
    expected = soak.continuations.tokens[0]
    soak.continuations.check(0, expected)
    other = [*expected[:3], int(soak.continuations.exact[0][3].argmin()), *expected[4:]]
    with pytest.raises(AssertionError, match="prompt 0: token 3 is"):
        soak.continuations.check(0, other)
    with pytest.raises(AssertionError, match="prompt 0: 2 tokens"):
        soak.continuations.check(0, expected[:2])
    soak.contenders[0].check_bits(0, np.zeros(3))
    with pytest.raises(AssertionError, match="call 0 has 2 different results"):
        soak.contenders[0].check_bits(0, np.ones(3))


def test_an_error_ends_the_soak(soak: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("unlucky")

    monkeypatch.setattr(GenerationSession, "submit", fail)
    good, _ = run(fresh(soak), 30.0)
    assert not good
    assert "failed: MemoryError: unlucky" in capsys.readouterr().out


def test_sigterm_ends_the_soak_with_a_report(soak: Any, capsys: Any) -> None:
    soak = fresh(soak)
    before = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    good, rows = run(soak, 60.0)
    timer.join()
    assert good, capsys.readouterr().out
    assert rows
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_minute_on_the_cpu() -> None:
    assert SCRIPT["main"](["--device", "cpu", "--size", "tiny", "--texts", "24", "--minutes", "1"]) == 0


@pytest.mark.gpu
def test_seconds_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """With a session in each precision."""
    assert SCRIPT["main"](["--device", "cuda", "--size", "tiny", "--texts", "24", "--minutes", "0.1"]) == 0
    printed = capsys.readouterr().out
    names = ("bfloat16", "float16") if fp8.missing(torch.device("cuda")) else ("bfloat16", "float16", "fp8")
    assert all(f"{kind}, {name}: " in printed for name in names for kind in ("encode", "submit"))
    assert "generate: " in printed
