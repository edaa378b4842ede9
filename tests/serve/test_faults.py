"""Limits, deadlines, disconnections, keys, signals and models that cannot be loaded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="httpx is not installed: pip install httpx")

TEXT = "The people of the United States."


def waited(condition: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def slow(folders: dict[str, Path], start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server whose batches wait for an event."""
    from fasttfm.inference.scheduling import Scheduler

    launch, gate = Scheduler.run, threading.Event()

    def gated(self: Scheduler, *arguments: Any) -> Any:
        gate.wait(30)
        return launch(self, *arguments)

    def run(**limits: Any) -> tuple[Any, threading.Event]:
        server = start([folders["embedder"]], **limits).wait_until_ready()
        monkeypatch.setattr(Scheduler, "run", gated)
        return server, gate

    yield run
    gate.set()


def test_each_limit_is_named_with_its_value(folders: dict[str, Path], start: Any) -> None:
    limits = {"max_client_batch_size": 3, "max_request_tokens": 20, "payload_limit": 2000, "auto_truncate": False}
    server = start([folders["embedder"]], **limits).wait_until_ready()
    for body, words in (
        ({"inputs": ["a"] * 4}, ("batch size 4", "maximum allowed batch size 3", "--max-client-batch-size")),
        ({"inputs": [TEXT] * 3}, ("maximum allowed 20", "--max-request-tokens")),
        ({"inputs": "a" * 2000}, ("2000 bytes", "--payload-limit")),
        ({"inputs": "a " * 200}, ("less than 128 tokens",)),
    ):
        error = server.refused("/embed", body, 413)
        assert error["error_type"] == "Validation"
        assert all(word in error["error"] for word in words), error
    chunks = (b"x" * 1000 for _ in range(5))
    headers = {"content-type": "application/json"}
    assert server.client.post("/embed", content=chunks, headers=headers).status_code == 413


def test_overload_is_429_with_the_limit(slow: Any) -> None:
    server, gate = slow(max_concurrent_requests=2)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.new_client().post, "/embed", json={"inputs": TEXT}) for _ in range(2)]
        assert waited(lambda: server.at.server.admission.requests == 2)
        refused = server.client.post("/v1/embeddings", json={"input": TEXT})
        assert refused.status_code == 429
        assert "--max-concurrent-requests" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert server.client.get("/health").status_code == 200
        gate.set()
        assert [each.result().status_code for each in running] == [200, 200]
    assert waited(lambda: server.at.server.admission.requests == 0)


def test_a_full_queue_is_429(slow: Any) -> None:
    server, gate = slow(max_queue=4)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(server.new_client().post, "/embed", json={"inputs": [TEXT] * 2}) for _ in range(8)]
        assert waited(lambda: server.at.server.admission.requests <= 5 and server.at.server.admission.waiting >= 3)
        assert waited(lambda: sum(each.done() for each in running) >= 1)
        gate.set()
        statuses = [each.result().status_code for each in running]
    assert set(statuses) == {200, 429}
    assert waited(lambda: server.at.server.admission.waiting == 0)


def test_a_deadline_is_503(slow: Any) -> None:
    server, gate = slow(request_timeout=0.2)
    error = server.refused("/embed", {"inputs": TEXT}, 503)
    assert "0.2 seconds" in error["error"]
    gate.set()
    assert waited(lambda: server.client.post("/embed", json={"inputs": TEXT}).status_code == 200)


def test_a_client_that_disconnects_cancels_its_work(slow: Any) -> None:
    server, gate = slow()
    state = server.at.server
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.new_client().post, "/embed", json={"inputs": TEXT})  # blocks the session
        assert waited(lambda: state.admission.requests == 1 and state.admission.waiting == 0)
        body = json.dumps({"inputs": [TEXT] * 8}).encode()
        head = (
            f"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.at.port)) as connection:
            connection.sendall(head.encode() + body)
            assert waited(lambda: state.admission.waiting == 8)
        assert waited(lambda: state.admission.waiting == 0)  # while the first one is computed
        assert not first.done()
        gate.set()
        assert first.result().status_code == 200


def test_a_slow_client_blocks_no_other(folders: dict[str, Path], start: Any) -> None:
    server = start([folders["embedder"]], read_timeout=1.0).wait_until_ready()
    head = b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.at.port), timeout=20) as connection:
        connection.sendall(head)
        assert len(server.post("/embed", {"inputs": TEXT})) == 1
        answer = b""
        while b"--read-timeout" not in answer and (part := connection.recv(4096)):
            answer += part
    assert b"408" in answer.partition(b"\r\n")[0]
    assert b"--read-timeout" in answer


def test_keys(folders: dict[str, Path], start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    server = start([folders["embedder"]], keys=keys).wait_until_ready()
    for header in (
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer first-key-and-more",
        "Basic first-key",
        "first-key",
        "Bearer é",
    ):
        response = server.client.post("/embed", json={"inputs": TEXT}, headers={"authorization": header.encode()})
        assert response.status_code == 401
        assert "key" in response.json()["error"]
    for key in ("first-key", "second-key"):
        server.post("/embed", {"inputs": TEXT}, headers={"authorization": f"Bearer {key}"})
    assert server.client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/metrics", "/", "/docs"):
        assert server.client.get(path).status_code == 200


def test_a_failed_computation_is_424(folders: dict[str, Path], start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fasttfm.inference.scheduling import Scheduler

    server = start([folders["embedder"]]).wait_until_ready()

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device has failed\nwith details")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "run", fail)
        error = server.refused("/embed", {"inputs": TEXT}, 424)
    assert error == {"error": "Backend error: RuntimeError: the device has failed", "error_type": "Backend"}
    server.post("/embed", {"inputs": TEXT})


def test_health_is_503_after_a_device_fault(folders: dict[str, Path], start: Any) -> None:
    server = start([folders["embedder"]]).wait_until_ready()
    (model,) = server.at.server.loaded.models.values()
    model.sessions[0]._scheduler.ended = "a kernel has failed: an illegal memory access was encountered"
    response = server.client.get("/health")
    assert response.status_code == 503
    assert "illegal memory access" in response.json()["error"]
    assert server.refused("/embed", {"inputs": TEXT}, 503)["error_type"] == "Unhealthy"


def test_health_is_503_while_models_are_loaded(
    folders: dict[str, Path], start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasttfm.serve import server as module

    load, gate = module.load, threading.Event()
    monkeypatch.setattr(module, "load", lambda source: gate.wait(30) and load(source))
    server = start([folders["embedder"]])
    assert server.client.get("/health").status_code == 503
    assert "loaded" in server.refused("/embed", {"inputs": TEXT}, 503)["error"]
    assert server.client.get("/").status_code == 200
    gate.set()
    server.wait_until_ready()
    server.post("/embed", {"inputs": TEXT})


def test_a_model_that_cannot_be_loaded_ends_the_server(start: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    server = start([tmp_path])
    server.thread.join(60)
    assert server.status == 1


def test_a_head_without_weights_cannot_be_served(folders: dict[str, Path], start: Any, tmp_path: Path) -> None:
    for path in folders["embedder"].iterdir():
        if path.is_file() and path.name not in ("modules.json", "config.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folders["embedder"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    server = start([tmp_path])
    server.thread.join(60)
    assert server.status == 1


# ---- the process -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A process of ``fasttfm serve`` that is ready, and a client of it."""
    command = [sys.executable, "-m", "fasttfm", "serve", "--model", str(folder), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--hostname", "127.0.0.1", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[-1])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            assert waited(lambda: is_healthy(client), 300), log.read_text()
            yield process, client
    finally:
        process.kill()
        process.communicate()


def is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:  # several processes listen only once they run
        return False


@pytest.mark.slow
def test_signals(folders: dict[str, Path], tmp_path: Path) -> None:
    """SIGHUP reloads without losing a request, SIGTERM drains and exits with 0; a log has no text and no raw path."""
    log = tmp_path / "log"
    with serving(folders["embedder"], log, "--access-log") as (process, client):
        client.get("/a%0ainjected-line")
        expected = client.post("/embed", json={"inputs": TEXT}).json()
        process.send_signal(signal.SIGHUP)
        while "reloaded" not in log.read_text():
            assert client.post("/embed", json={"inputs": TEXT}).json() == expected
        assert client.post("/embed", json={"inputs": TEXT}).json() == expected
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(client.post, "/embed", json={"inputs": [TEXT] * 32}) for _ in range(8)]
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            statuses = {each.result().status_code for each in running if each.exception() is None}
        assert process.wait(300) == 0
    assert statuses == {200}
    text = log.read_text()
    assert TEXT not in text
    assert "\ninjected-line" not in text
    assert "injected-line" in text


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that serve: those that multiprocessing has spawned, without its resource tracker."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(each) for each in listed if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.slow
def test_several_processes_are_one_server(folders: dict[str, Path], tmp_path: Path) -> None:
    """Requests of new connections reach both processes; metrics and health are those of both."""
    log = tmp_path / "log"
    with serving(folders["embedder"], log, "--processes", "2") as (process, client):
        assert len(children_of(process)) == 2
        expected = client.post("/embed", json={"inputs": TEXT}).json()
        for _ in range(30):
            with httpx.Client(base_url=client.base_url, trust_env=False) as other:
                assert other.post("/embed", json={"inputs": TEXT}).json() == expected
        counts = [process_counts(client), process_counts(client)]
        assert [int(count) for count in counts] == [31, 31]
        assert client.get("/stats").json()["processes"] == 2
        process.send_signal(signal.SIGHUP)
        assert waited(lambda: log.read_text().count("reloaded") == 2, 300), log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    for number in range(2):
        assert f"process {number}: ready" in log.read_text()


def process_counts(client: httpx.Client) -> float:
    """The number of requests that a process says the server has answered."""
    (line,) = re.findall(r'^te_request_success\{method="single"\} (\S+)$', client.get("/metrics").text, re.MULTILINE)
    return float(line)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["child", "parent"])
def test_a_process_that_dies_ends_the_server(killed: str, folders: dict[str, Path], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(folders["embedder"], log, "--processes", "2") as (process, client):
        children = children_of(process)
        os.kill(children[0] if killed == "child" else process.pid, signal.SIGKILL)
        assert process.wait(300) == (1 if killed == "child" else -signal.SIGKILL)
        assert waited(lambda: not any(Path(f"/proc/{each}").exists() for each in children), 300), log.read_text()
        with pytest.raises(httpx.TransportError):
            client.get("/health")
    assert killed == "parent" or "process 0 has ended with status -9" in log.read_text()


class Ending:
    """A process of a supervisor. ``answers`` are those of ``is_alive``, of which the last one is repeated."""

    def __init__(self, number: int, *answers: bool) -> None:
        self.pid = self.sentinel = number
        self.answers, self.exitcode = [*answers], 0

    def is_alive(self) -> bool:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.mark.parametrize("asked", range(1, 5))
def test_the_end_of_a_process_is_noticed_before_the_next_wait(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentinel is ready before the process has ended, which may be between any two questions."""
    from fasttfm.serve import processes

    dying, other = Ending(1, *[True] * asked, False), Ending(2, True)
    waits: list[tuple[list[int], list[bool]]] = []

    def wait(sentinels: list[int], timeout: float) -> None:
        waits.append((sentinels, other.answers))

    def kill(pid: int, number: int) -> None:
        {1: dying, 2: other}[pid].answers = [False]

    monkeypatch.setattr(processes, "wait", wait)
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert processes._supervise([dying, other], 30.0) == 1
    assert ([2], [True]) not in waits  # for a process that nothing has told to end


def test_numbers_of_several_processes_are_added() -> None:
    from fasttfm.serve.metrics import Metrics

    first, second = Metrics(), Metrics()
    for metrics, durations in ((first, (0.1, 0.2)), (second, (0.3,))):
        for seconds in durations:
            metrics.answered("single", (seconds, 0.0, 0.0, seconds), 2, 10)
        metrics.gauges["te_queue_size"] = ("Sequences in the queue.", lambda: iter([({"model": "a"}, 2.0)]))
    total = Metrics.total([json.loads(json.dumps(each.state())) for each in (first, second)])
    text = total.exposition().decode()
    assert 'te_request_success{method="single"} 3.0' in text
    assert "te_request_duration_count 3.0" in text
    assert "te_request_duration_sum 0.6" in text
    assert 'te_queue_size{model="a"} 4.0' in text
    assert total.recent()["texts_per_second"] == pytest.approx(0.6)


def test_curl(served: Any) -> None:
    """A request as TEI's documentation writes it."""
    import shutil

    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "-s", "--noproxy", "*", f"{served.url}/embed", "-X", "POST", "-d", '{"inputs":"What is Peace?"}']
    answer = subprocess.run([*command, "-H", "Content-Type: application/json"], capture_output=True, check=True).stdout
    assert len(json.loads(answer)[0]) == 64
