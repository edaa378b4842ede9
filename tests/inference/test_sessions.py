"""``Sessions``: several devices in one process compute what one session computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from model_fixtures import bert_directory, wordpiece

from fasttfm.cli.main import COMMANDS, parser_of
from fasttfm.inference import Session
from fasttfm.inference.sessions import Sessions, devices_named

__all__ = ["bert_directory", "wordpiece"]
TEXTS = [f"{number} ships and {number % 7} nations" + " of the north" * (number % 9) for number in range(2500)]


@pytest.fixture(scope="module")
def two(bert_directory: Path) -> Iterator[Sessions]:
    with Sessions(bert_directory, devices=["cpu", "cpu"]) as sessions:
        yield sessions


@pytest.fixture(scope="module")
def one(bert_directory: Path) -> Iterator[Session]:
    with Session(bert_directory, device="cpu") as session:
        yield session


def test_results_are_those_of_one_session(two: Sessions, one: Session) -> None:
    expected = one.encode(TEXTS)
    assert np.allclose(two.encode(TEXTS), expected, atol=1e-5)
    assert np.allclose(np.stack(list(two.stream(iter(TEXTS)))), expected, atol=1e-5)
    assert np.allclose(two.encode(TEXTS[0]), expected[0], atol=1e-5)
    assert np.allclose(two.submit(TEXTS[0]).result(), expected[0], atol=1e-5)
    assert two.encode([]).shape == (0, two.width) == (0, one.width)
    states = two.encode(TEXTS[:5], output="states")
    assert all(
        np.allclose(*pair, atol=1e-5) for pair in zip(states, one.encode(TEXTS[:5], output="states"), strict=True)
    )
    sparse = two.encode(TEXTS[:5], output="sparse")
    assert np.allclose(sparse.dense(), one.encode(TEXTS[:5], output="sparse").dense(), atol=1e-4)


def test_all_devices_compute(bert_directory: Path) -> None:
    with Sessions(bert_directory, devices=("cpu", "cpu", "cpu")) as sessions:
        sessions.encode(TEXTS[:90])
        assert [each.counts.texts for each in sessions.sessions] == [30, 30, 30]
        assert sessions.counts.texts == 90
        assert sessions.devices == [torch.device("cpu")] * 3
        with ThreadPoolExecutor(4) as threads:
            vectors = list(threads.map(lambda text: sessions.submit(text).result(timeout=60), TEXTS[:40]))
        assert np.allclose(vectors, sessions.encode(TEXTS[:40]), atol=1e-5)
        assert sessions._tokens == [0, 0, 0]


def test_inputs_go_to_the_session_with_the_fewest_tokens(bert_directory: Path) -> None:
    with Sessions(bert_directory, devices=["cpu", "cpu"]) as sessions:
        sessions._tokens = [10, 0]
        sessions.submit("ships").result(timeout=60)
        sessions._tokens = [0, 10]
        sessions.submit("ships and nations").result(timeout=60)
        assert [each.counts.texts for each in sessions.sessions] == [1, 1]
        sessions.sessions[0].close()  # it computes no more
        sessions._tokens = [0, 10]
        sessions.submit("ships").result(timeout=60)
        assert [each.counts.texts for each in sessions.sessions] == [1, 2]


def test_a_stream_is_read_a_bounded_number_ahead(two: Sessions) -> None:
    read = itertools.count()
    stream = two.stream(f"{next(read)} ships" for _ in range(20_000))
    next(stream)
    assert next(read) < 8000


def test_truncated_texts_are_counted_in_a_warning(bert_directory: Path) -> None:
    with (
        Sessions(bert_directory, devices=["cpu", "cpu"]) as sessions,
        pytest.warns(UserWarning, match="1 of 3 texts have more than 128 tokens and are truncated"),
    ):
        sessions.encode(["ships", "ships " * 300, "nations"])


def test_a_closed_session_computes_nothing(bert_directory: Path) -> None:
    sessions = Sessions(bert_directory, devices=["cpu", "cpu"])
    sessions.close()
    with pytest.raises(RuntimeError, match="expected an open session, got a closed one"):
        sessions.encode(["ships"])
    assert sessions._tokens == [0, 0]


def test_devices_by_name(bert_directory: Path) -> None:
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert devices_named("all") == gpus or [torch.device("cpu")]
    assert devices_named("cpu,cpu") == [torch.device("cpu")] * 2
    with pytest.raises(
        ValueError, match="expected all, or cpu, cuda or cuda:N with commas between them, got 'cpu,tpu'"
    ):
        devices_named("cpu,tpu")
    with pytest.raises(ValueError, match="devices: expected at least one"):
        devices_named([])
    with pytest.raises(ValueError, match="expected a device that torch sees"):
        devices_named("cuda:99")
    with pytest.raises(TypeError, match="expected devices, got device"):
        Sessions(bert_directory, device="cpu")


def test_a_server_has_a_session_on_each_device() -> None:
    from fasttfm.cli import serve

    parser, _ = parser_of({"serve": serve})
    assert COMMANDS["serve"] == serve.__name__
    arguments = parser.parse_args(["serve", "--model", "DIR", "--device", "cpu,cpu"])
    assert [source.devices for source in serve.settings_of(arguments).sources] == [(torch.device("cpu"),) * 2]
