"""Ray: nodes, workers and drivers of a local cluster that are killed lose and double nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_fixtures import bert_directory, wordpiece

from fasttfm.inference import Session
from fasttfm.inference.part_files import COMPLETE, UNFINISHED
from fasttfm.inference.ray import Embedder

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
__all__ = ["bert_directory", "wordpiece"]
TEXTS = [f"{number} ships of {number % 7} nations" for number in range(3000)]
SMALL = {"object_store_memory": 100 << 20}


def test_an_embedder_adds_vectors(bert_directory: Path) -> None:
    embedder = Embedder(bert_directory, column="title", vector_column="embedding", device="cpu", threads=1)
    batch = embedder({"title": np.array(TEXTS[:5], object), "id": np.arange(5)})
    assert list(batch) == ["title", "id", "embedding"]
    assert np.array_equal(batch["embedding"], Session(bert_directory, device="cpu").encode(TEXTS[:5]))
    with pytest.raises(ValueError, match=r"Embedder: column: expected a column 'title' of texts, got columns 'text'"):
        embedder({"text": np.array(TEXTS[:5], object)})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node without CPUs, on which no worker runs."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL})
        yield made
        made.shutdown()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "the driver has ended"
        time.sleep(0.001)


def kill_worker(node: Any) -> None:
    """Kills the actor of a node, which is a child of its raylet."""
    (raylet,) = (each.process.pid for each in node.all_processes["raylet"])
    for number in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split():
        if b"_Worker" in Path(f"/proc/{number}/cmdline").read_bytes():
            os.kill(int(number), signal.SIGKILL)
            return
    raise AssertionError("no actor on this node")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="workers of a node are read from Linux's /proc")
def test_killed_nodes_workers_and_drivers(cluster: Any, bert_directory: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="it reads part files")
    data, output = tmp_path / "texts.txt", tmp_path / "parts"
    data.write_text("\n".join(TEXTS) + "\n")
    call = [sys.executable, "-m", "fasttfm", "embed", "--model", str(bert_directory), "--data", str(data)]
    call += ["--output", str(output), "--rows-per-part", "10", "--engine", "ray", "--address", cluster.address]
    call += ["--workers", "2", "--device", "cpu"]

    def written() -> int:
        return len(list(output.glob("part-*")))

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(call, stdout=subprocess.DEVNULL)

    first, second = (cluster.add_node(num_cpus=1, **SMALL) for _ in range(2))
    driver = start()
    wait_for(lambda: written() >= 5, driver)
    cluster.remove_node(second, allow_graceful=False)  # kills its processes
    count = written()
    wait_for(lambda: written() >= count + 5, driver)
    driver.kill()
    driver.wait()
    assert not (output / COMPLETE).exists()
    count = written()
    driver = start()
    wait_for(lambda: written() >= count + 5, driver)
    kill_worker(first)
    cluster.add_node(num_cpus=1, **SMALL)
    assert driver.wait(timeout=300) == 0
    rows = [row for path in sorted(output.glob("part-*")) for row in parquet.read_table(path).to_pylist()]
    assert [row["row"] for row in rows] == list(range(len(TEXTS)))
    assert [row["text"] for row in rows] == TEXTS
    assert (output / COMPLETE).exists()
    assert not (output / UNFINISHED).exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of Ray Data, about itself
def test_a_data_set_of_ray(cluster: Any, bert_directory: Path) -> None:
    import ray.data

    node = cluster.add_node(num_cpus=2, **SMALL)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        data = ray.data.from_items([{"text": text, "number": number} for number, text in enumerate(TEXTS[:300])])
        vectors = data.map_batches(
            Embedder,
            fn_constructor_kwargs={"model": str(bert_directory), "device": "cpu"},
            batch_size=64,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=1,
        )
        rows = sorted(vectors.take_all(), key=lambda row: row["number"])
    finally:
        ray.shutdown()
        cluster.remove_node(node)
    assert [row["text"] for row in rows] == TEXTS[:300]
    expected = Session(bert_directory, device="cpu").encode(TEXTS[:300])
    assert np.allclose(np.stack([row["vector"] for row in rows]), expected, atol=1e-5)
