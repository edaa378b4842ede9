"""The load generator against the tests' server."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def load() -> Any:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("serve_load")
    finally:
        sys.path.remove(folder)


def test_closed_and_open_loops(served: Any, load: Any) -> None:
    bodies = load.single_bodies(["Peace and commerce.", "The army."], "embedder")
    closed = asyncio.run(load.closed_loop(served.at.port, "/v1/embeddings", bodies, 4, 0.5))
    assert closed.errors == 0
    assert len(closed.latencies) > 4
    opened = asyncio.run(load.open_loop(served.at.port, "/v1/embeddings", bodies, 20, 0.5))
    assert opened.errors == 0
    assert opened.latencies
    refused = asyncio.run(load.closed_loop(served.at.port, "/v1/embeddings", [b"{}"], 1, 0.2))
    assert refused.errors > 0
    assert not refused.latencies


def test_the_summary(load: Any) -> None:
    fast, slow = (load.Measured(1.0, [seconds] * count) for seconds, count in ((0.01, 30), (0.02, 10)))
    rows = [
        load.row_of(fast, "closed loop, single texts", "fasttfm serve", "32 clients"),
        load.row_of(slow, "closed loop, single texts", "infinity, torch", "32 clients"),
    ]
    assert load.summary(rows)[1].strip().startswith("3.00 times infinity, torch (10/s, p99 20.0 ms)")
