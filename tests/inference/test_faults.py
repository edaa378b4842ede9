"""Faults of a session: batches that do not fit into memory, a device that has failed, and damaged files."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import small_bert

from fasttfm.inference import Session, scheduling
from fasttfm.inference.calibration import Calibration
from fasttfm.inference.network import Inputs, Network, Output
from fasttfm.models.checkpoint_files import CheckpointError

Ids = Sequence[Sequence[int]]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes networks fail with more than 40 tokens. Returns the numbers of tokens that were tried."""
    run = Network.run
    tried: list[int] = []

    def limited(self: Network, output: Output, inputs: Inputs) -> torch.Tensor:
        tried.append(len(inputs.ids))
        if len(inputs.ids) > 40:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return run(self, output, inputs)

    monkeypatch.setattr(Network, "run", limited)
    return tried


@pytest.mark.parametrize("output", ["vectors", "states"])
def test_a_batch_that_does_not_fit_is_split(bert: Any, sentences: Ids, output: str, little_memory: list[int]) -> None:
    """With one warning, and the results of batches that fit."""
    chosen = [ids[:30] for ids in sentences[:12]]
    with Session(bert, max_tokens=32) as session:
        expected = session.encode(chosen, output=output)
        assert max(little_memory) <= 40
    little_memory.clear()
    with Session(bert, max_tokens=1000) as session:
        with pytest.warns(UserWarning, match=r"a batch of \d+ tokens does not fit into the device's memory"):
            found = session.encode(chosen, output=output)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = session.encode(chosen, output=output)
        assert session.counts.texts == 24
    assert max(little_memory) > 40
    for several in (found, again):
        for ours, theirs in zip(several, expected, strict=True):
            assert np.allclose(ours, theirs, atol=1e-5)


@pytest.mark.usefixtures("little_memory")
def test_a_text_that_does_not_fit_fails_by_itself(bert: Any, sentences: Ids) -> None:
    """The requests of its batch, and later ones, have their results."""
    long = next(ids for ids in sentences if len(ids) > 60)
    short = [ids[:20] for ids in sentences[:6]]
    message = rf"Session: inputs: {len(long)} tokens do not fit into the device's memory: tried to allocate 3 GiB"
    with Session(bert, max_tokens=1000) as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with session._scheduler.lock:  # the requests gather
            futures = [session.submit(ids) for ids in (*short[:3], long, *short[3:])]
        with pytest.raises(torch.OutOfMemoryError, match=message):
            futures.pop(3).result(30)
        rows = np.stack([future.result(30) for future in futures])
        with pytest.raises(torch.OutOfMemoryError, match=message):
            session.encode([*short, long])
        assert np.allclose(session.encode(short), rows, atol=1e-5)


# ---- a device that has failed ----------------------------------------------------------------------------------------


class Failing:
    """Stands for a device whose kernels fail from some launch on, and for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
        self.good, self.has_failed = good, False
        run = Network.run

        def failing(network: Network, output: Output, inputs: Inputs) -> torch.Tensor:
            self.good -= 1
            if self.good < 0:
                self.has_failed = True
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
            return run(network, output, inputs)

        monkeypatch.setattr(Network, "run", failing)
        monkeypatch.setattr(scheduling, "has_failed", lambda stream: self.has_failed)


def test_a_failed_device_ends_the_session(bert: Any, sentences: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every waiting request gets an error, later ones raise one that names the first, and the session closes."""
    Failing(monkeypatch, good=1)
    first = "RuntimeError: CUDA error: an illegal memory access was encountered"
    session = Session(bert, max_tokens=64)
    session.encode(sentences[0][:3])
    with session._scheduler.lock:
        futures = [session.submit(ids[:50]) for ids in sentences[:6]]
    errors = [str(future.exception(30)) for future in futures]
    assert all("an illegal memory access was encountered" in each for each in errors)
    assert f"got one on which a kernel has failed: {first}" in errors[-1]
    for call in (session.submit, session.encode, lambda ids: list(session.stream([ids]))):
        with pytest.raises(RuntimeError, match=f"expected a device that computes .*, got one .*: {first}$"):
            call(sentences[0])
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match=first):  # still the reason
        session.submit(sentences[0])
    assert not [each for each in threading.enumerate() if each is session._dispatcher._thread]


def test_an_error_of_one_batch_does_not_end_the_session(
    bert: Any, sentences: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Failing(monkeypatch, good=0)
    monkeypatch.setattr(scheduling, "has_failed", lambda stream: False)
    with Session(bert) as session:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            session.submit(sentences[0]).result(30)
        device.good = 5
        assert session.submit(sentences[0]).result(30).shape == (session.width,)


@pytest.mark.parametrize("output", ["vectors", "states"])
@pytest.mark.parametrize(
    ("device", "max_graphs"),
    [("cpu", 0), *(pytest.param("cuda", graphs, marks=pytest.mark.gpu) for graphs in (0, 8))],
)
def test_a_kernel_that_gave_up_is_an_error(device: str, max_graphs: int, output: str) -> None:
    """Its results are NaN. A model whose results are NaN is none."""
    model = small_bert("BertModel").to(device)
    model.embeddings.norm.bias.data.fill_(torch.nan)
    inputs: list[list[int]] = [[], [1, 2, 3], [4, 5]]  # the first one has no row in the batch
    with Session(model, max_graphs=max_graphs) as session:
        word = session._scheduler.kept.workspace.memory(256, torch.device(device))
        assert word is not None
        for _ in range(4):  # the later ones by a graph
            assert np.isnan(session.encode(inputs, output=output)[1]).all()
            word.view(torch.int32)[1] = 1
            if device == "cuda":
                torch.cuda.synchronize()
            with pytest.raises(RuntimeError, match=r"expected all blocks .* results of that launch"):
                session.encode(inputs, output=output)
        word.view(torch.int32)[1] = 1
        with pytest.raises(RuntimeError, match="few_rows_layers: expected all blocks"):
            session.submit([1, 2], output=output).result(30)
        assert np.isnan(session.submit([1, 2], output=output).result(30)).all()


FAULT = """
import sys

import torch
import triton
import triton.language as tl

from fasttfm.inference import Session
from fasttfm.models import BertConfig, BertModel


@triton.jit
def store(target, offset):
    tl.store(target + tl.load(offset), 1)


graphs, kind = int(sys.argv[1]), sys.argv[2]
sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
session = Session(BertModel(BertConfig(vocab_size=300, **sizes)).cuda().bfloat16().eval(), max_graphs=graphs)
ids = [list(range(5, 45))] * 3
target, offset = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
run = session.network.run


def faulty(*arguments):
    store[(1,)](target, offset)
    return run(*arguments)


session.network.run = faulty
for _ in range(4):
    session.encode(ids)
assert session.graph_counts.captured == (1 if graphs else 0), session.graph_counts
offset.fill_(1 << 40)  # from now on the kernel writes to an address far outside of any memory
torch.cuda.synchronize()
if kind == "submit":
    futures = [session.submit(each) for each in ids * 20]
    errors = [future.exception(60) for future in futures]
    assert all(isinstance(each, RuntimeError) for each in errors), errors
else:
    try:
        session.encode(ids)
    except RuntimeError as error:
        print("first:", error)
    else:
        sys.exit("no error")
for call in (lambda: session.submit(ids[0]), lambda: session.encode(ids), lambda: session.encode(ids[0])):
    try:
        call()
    except RuntimeError as error:
        assert "expected a device that computes" in str(error), error
        assert "illegal" in str(error), error
    else:
        sys.exit("no error later")
session.close()
print("closed")
sys.exit(7)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("kind", ["encode", "submit"])
def test_a_failed_kernel_on_a_gpu(graphs: int, kind: str, tmp_path: Path) -> None:
    """In a process of its own, which ends with its exit code: it neither hangs nor aborts."""
    path = tmp_path / "fault.py"  # Triton reads the source of kernels
    path.write_text(FAULT)
    command = [sys.executable, str(path), str(graphs), kind]
    found = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert found.returncode == 7, f"exit code {found.returncode}\n{found.stdout}\n{found.stderr}"
    assert "closed" in found.stdout
    assert "terminate" not in found.stderr
    assert "Exception ignored" not in found.stderr


@pytest.mark.gpu
def test_a_batch_that_does_not_fit_on_a_gpu() -> None:
    """Half of the device's free memory is out of reach, and a batch of all texts would need more than the rest."""
    torch.cuda.empty_cache()
    model = small_bert("BertForMaskedLM", hidden_size=128, vocab_size=30000, max_position_embeddings=512)
    generator = np.random.default_rng(0)
    given = [generator.integers(1, 30000, 500).tolist() for _ in range(64)]
    total = torch.cuda.get_device_properties(0).total_memory
    with Session(model, device="cuda", max_tokens=64 * 512) as session:
        expected = session.encode(given[:4], output="logits")
        allowed = torch.cuda.memory_reserved() + 2**30  # 32,000 rows of fp32 logits take 3.6 GiB
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            with pytest.warns(UserWarning, match="does not fit into the device's memory and is split"):
                found = session.encode(given, output="logits")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        for ours, theirs in zip(found, expected, strict=False):
            assert np.abs(ours - theirs).max() <= 0.05 * np.abs(theirs).max()
        assert len(found) == 64
        assert session.encode(given[:4], output="logits")[0].shape == expected[0].shape


# ---- files -----------------------------------------------------------------------------------------------------------

GOOD = Calibration(((1.0, 2.0, 3.0, 4.0),) * 2, 100)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"{}",
        b'{"tokens": 5, "amax": 3}',
        b'{"tokens": 5, "amax": [3]}',
        b'{"tokens": 5, "amax": [{"qkv": 1}]}',
        b'{"tokens": 5, "amax": []}',
        b'{"tokens": Infinity, "amax": [%s]}',
        b'{"tokens": -1, "amax": [%s]}',
        b'{"tokens": 5, "amax": [%n]}',
        b'{"tokens": 5, "amax": [%m]}',
        "truncated",
    ],
)
def test_a_damaged_calibration_is_reported(tmp_path: Path, content: Any) -> None:
    path = GOOD.save(tmp_path)
    assert Calibration.load(tmp_path) == GOOD
    if content == "truncated":
        content = path.read_bytes()[:-20]
    layers = {b"%s": b"1.0", b"%n": b"NaN", b"%m": b"-1.0"}
    names = [b"qkv", b"out", b"up", b"down"]
    for mark, value in layers.items():
        layer = b"{" + b", ".join(b'"%b": %b' % (name, value) for name in names) + b"}"
        content = content.replace(mark, layer)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path)):
        Calibration.load(tmp_path)
