"""benchmarks/squad_rate.py: the drawn contexts, and the search for the rate of a server."""

from __future__ import annotations

import random
import runpy
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fasttfm.inference import AnswerSpans
from fasttfm.inference.formats import Tokens

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        return SimpleNamespace(**runpy.run_path(str(FOLDER / "squad_rate.py")))
    finally:
        sys.path.remove(str(FOLDER))


def test_contexts_have_the_drawn_number_of_words(script: Any) -> None:
    source = script.contexts(["one two three"] * 7, random.Random(0))
    words = [len(next(source).split()) for _ in range(2000)]
    assert np.mean(words) == pytest.approx(script.WORDS + 1, abs=4)  # whole lines
    assert script.FEWEST <= min(words) < max(words) <= script.MOST + 2


def test_the_highest_rate_within_the_limit_is_found(script: Any) -> None:
    def late(session: Any, samples: Any, rate: float, seconds: float) -> Any:
        return np.full(100, script.LIMIT_SECONDS * rate / 70)

    script.server.__globals__["latencies"] = late
    try:
        rate, milliseconds = script.server(None, None, 100.0, 1.0)
    finally:
        script.server.__globals__["latencies"] = script.latencies
    assert 70 - 100 / 2**script.SERVER_STEPS <= rate <= 70
    assert milliseconds == pytest.approx(1e3 * script.LIMIT_SECONDS * rate / 70)


def test_latencies_count_from_the_arrivals(script: Any) -> None:
    class Idle:
        def submit_sequences(self, tokens: Any, **options: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(None)
            return future

    samples = script.Samples([Tokens([1], [0])], AnswerSpans())
    latencies = script.latencies(Idle(), samples, 2000.0, 0.05)
    assert len(latencies) == 100
    assert (latencies > 0).all()
    assert np.median(latencies) < 0.02
