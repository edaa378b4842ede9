"""Times part files: two workers with one thread each, next to two independent sessions; memory over very many texts.

    python benchmarks/cluster_rate.py rate --size base --runs 2 --out benchmarks/results    about three minutes
    python benchmarks/cluster_rate.py stream --texts 10000000 --out benchmarks/results

``rate``: contenders are two processes with a session each, which only compute (``sessions``), two ranks of
``fasttfm embed`` under torchrun, and two workers of ``fasttfm embed --engine ray``. All compute the same texts on two
cores, and runs alternate. A rate is without starting processes and opening the model: of sessions that of all texts,
of part files that between the first and the last one. ``fraction`` is that of the sessions' rate; the exit code is 1 if
one is below 0.92.

``stream``: a file of short texts goes through the reader, the parts and the files of ``embed`` with a simulated model,
whose vectors are the bytes of a text, in one process (``local``) and on a Ray cluster of this machine (``ray``). The
memory is that of the process and of all that it has started, without shared memory, once each worker has written some
parts. The exit code is 1 if its median
over the last third of the run is more than 3% above that over the second third.
"""

from __future__ import annotations

import argparse
import collections
import csv
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasttfm import __version__, models
from fasttfm.bench.timing import device_name, file_stem, percentiles
from fasttfm.cli.part_runs import PartWriter
from fasttfm.data import read_documents, shipped_corpus, train_tokenizer
from fasttfm.inference import Session, ray
from fasttfm.inference.part_files import PartFolder, Parts
from fasttfm.tasks.parquet_files import write_parquet
from fasttfm.tasks.text_rows import text_rows, texts_of_rows
from fasttfm.tasks.vector_files import Row

WORKERS = 2
LEAST_FRACTION, MOST_GROWTH = 0.92, 1.03
WIDTH = 16  # of simulated vectors
# One thread for each worker, for its tokenizer too.
THREADS = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "FASTTFM_BENCHMARK_WORKER": "1"}
COLUMNS = (
    *("case", "contender", "workers", "texts", "texts_per_s_p20", "texts_per_s_p50", "texts_per_s_p80", "fraction"),
    *("mib_second_third", "mib_last_third", "model", "rows_per_part", "runs", "device", "load", "torch_version"),
    "fasttfm_version",
)
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
    "mini": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "base": {},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("rate", "stream", "session"), help="session: a process of rate")
    parser.add_argument("--texts", type=int, help="default: 4096 for rate, 256 with --size base; 1,000,000 for stream")
    parser.add_argument(
        "--rows-per-part", type=int, help="default: 128 for rate, 16 with --size base; 10,000 for stream"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="mini", help="rate: the size of BERT")
    parser.add_argument("--contenders", nargs="+", help="default: sessions torchrun ray, or local ray for stream")
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
    parser.add_argument("--out", type=Path, help="folder for the CSV")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.case == "session":
        return session(settings)
    of_rate = (256, 16) if settings.size == "base" else (4096, 128)  # some seconds on each core
    texts, rows_per_part = of_rate if settings.case == "rate" else (1_000_000, 10_000)
    settings.texts = settings.texts or texts
    settings.rows_per_part = settings.rows_per_part or rows_per_part
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        rows, is_good = (rate if settings.case == "rate" else stream)(settings, Path(folder))
    if settings.out:
        path = settings.out / f"{file_stem(torch.device('cpu'))}-cluster.csv"
        write_rows(path, rows)
        print(f"rows: {path}")
    return 0 if is_good else 1


def row(settings: argparse.Namespace, contender: str, **values: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(COLUMNS, ""),
        "case": settings.case,
        "contender": contender,
        "texts": settings.texts,
        "rows_per_part": settings.rows_per_part,
        "device": device_name(torch.device("cpu")),
        "load": round(os.getloadavg()[0], 2),
        "torch_version": torch.__version__,
        "fasttfm_version": __version__,
        **values,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows, which replace those of the same case, contender and model."""
    key = ("case", "contender", "model")
    new = {tuple(str(entry[name]) for name in key) for entry in rows}
    kept = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows([entry for entry in kept if tuple(entry[name] for name in key) not in new] + rows)


# ---- rate ------------------------------------------------------------------------------------------------------------


def rate(settings: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], bool]:
    model, data = folder / "model", folder / "texts.txt"
    save_model(model, settings.size)
    lines = [line for text in read_documents(shipped_corpus()) for line in text.splitlines() if len(line) > 20]
    data.write_text("".join(f"{lines[number % len(lines)][:200]}\n" for number in range(settings.texts)))
    contenders: dict[str, Callable[..., float]] = {"sessions": of_sessions, "torchrun": of_torchrun, "ray": of_ray}
    names = ["sessions", *(name for name in settings.contenders or contenders if name != "sessions")]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for run in range(settings.runs):
        for name in names:
            rates[name].append(contenders[name](settings, model, data, folder / f"{name}-{run}"))
            print(f"run {run}: {name:9} {rates[name][-1]:9.1f} texts/s", flush=True)
    rows, best = [], statistics.median(rates["sessions"])
    for name, measured in rates.items():
        p20, p50, p80 = percentiles(measured)
        print(f"{name:9} {p50:9.1f} texts/s, {p50 / best:.1%} of the sessions")
        values = {f"texts_per_s_{part}": round(value, 1) for part, value in (("p20", p20), ("p50", p50), ("p80", p80))}
        more = {"fraction": round(p50 / best, 4), "model": f"bert-{settings.size}", "runs": settings.runs}
        rows.append(row(settings, name, workers=WORKERS, **values, **more))
    return rows, all(entry["fraction"] >= LEAST_FRACTION for entry in rows)


def save_model(folder: Path, size: str) -> None:
    tokenizer = train_tokenizer("wordpiece", read_documents(shipped_corpus() / "state-of-the-union.txt.gz"), 8192)
    torch.manual_seed(0)
    models.BertModel(models.BertConfig(vocab_size=tokenizer.vocab_size, **SIZES[size])).save_pretrained(folder)
    tokenizer.save(folder)


def of_sessions(settings: argparse.Namespace, model: Path, data: Path, output: Path) -> float:
    """The sum of the rates of two processes that compute the halves of the texts at the same time."""
    output.mkdir()
    lines = data.read_text().splitlines(keepends=True)
    processes = []
    for number in range(WORKERS):
        part = output / f"{number}.txt"
        part.write_text("".join(lines[number::WORKERS]))
        call = [sys.executable, __file__, "session", "--model", model, "--data", part]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = {**os.environ, **THREADS}
        processes.append(subprocess.Popen([str(word) for word in call], env=environment, text=True, **pipes))
    for process in processes:  # the models are open
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in processes)


def session(settings: argparse.Namespace) -> int:
    """One of the processes of ``of_sessions``: prints the rate of its session."""
    torch.set_num_threads(1)
    made = Session(settings.model, device="cpu")
    texts = settings.data.read_text().splitlines()
    made.encode(texts[:64])
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    for _ in made.stream(texts):
        pass
    print(len(texts) / (time.perf_counter() - begun))
    return 0


def of_torchrun(settings: argparse.Namespace, model: Path, data: Path, output: Path) -> float:
    """The sum of the rates of the ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS), "-m"]
    embed(settings, launcher, model, data, output)
    paths = sorted(output.glob("part-*"))
    times = [[path.stat().st_mtime for path in paths[rank::WORKERS]] for rank in range(WORKERS)]
    return sum(steady_rate(moments, settings.rows_per_part) for moments in times)


def of_ray(settings: argparse.Namespace, model: Path, data: Path, output: Path) -> float:
    """The rate of all workers, while both have parts."""
    options = ("--engine", "ray", "--workers", str(WORKERS))
    embed(settings, [sys.executable, "-m"], model, data, output, *options)
    times = sorted(path.stat().st_mtime for path in output.glob("part-*"))
    return steady_rate(times[WORKERS : 1 - WORKERS], settings.rows_per_part)


def embed(
    settings: argparse.Namespace, launcher: list[str], model: Path, data: Path, output: Path, *options: str
) -> None:
    call = [*launcher, "fasttfm", "embed", "--model", str(model), "--data", str(data), "--output", str(output)]
    call += ["--device", "cpu", "--quiet", "--rows-per-part", str(settings.rows_per_part), *options]
    subprocess.run(call, env={**os.environ, **THREADS}, check=True, stdout=subprocess.DEVNULL)


def steady_rate(times: list[float], rows: int) -> float:
    """Texts per second between the first and the last of the moments at which ``rows`` texts were complete."""
    if len(times) < 3:
        raise SystemExit("rate: expected --texts for at least 12 parts")
    return (len(times) - 1) * rows / (times[-1] - times[0])


# ---- stream ----------------------------------------------------------------------------------------------------------


class Simulated:
    """A model that takes next to no time: vectors are the first bytes of texts. Opens itself."""

    def __call__(self, path: Path, rows: Iterable[Any], first_row: int) -> tuple[int, int]:
        results = (Row(text, self.vector(text)) for text in texts_of_rows(rows, "text"))
        return write_parquet(path, results, "float32", first_row)

    @staticmethod
    def vector(text: str) -> np.ndarray:
        return np.frombuffer(text.encode()[:WIDTH].ljust(WIDTH), np.uint8).astype(np.float32)


class Opened:
    def __init__(self, folder: PartFolder, size: int) -> None:
        self.folder, self.size = folder, size

    def __call__(self) -> PartWriter:
        return PartWriter(Simulated(), self.folder, self.size)


def stream(settings: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], bool]:
    data, rows = folder / "texts.txt", []
    with data.open("w") as file:
        file.writelines(f"{number} ships and {number % 7} nations\n" for number in range(settings.texts))
    for name in settings.contenders or ("local", "ray"):
        output = PartFolder(folder / name, ".parquet", {})
        parts = Parts(text_rows([str(data)], "line", "text"), settings.rows_per_part)
        missing = parts.chosen(lambda number, output=output: not output.has(number))
        opened, workers = Opened(output, settings.rows_per_part), 1 if name == "local" else WORKERS
        written = run_here(opened, missing) if name == "local" else run_on_ray(opened, missing)
        collections.deque(itertools.islice(written, 2 * workers), maxlen=0)  # until all models are open
        begun = time.perf_counter()
        with Memory() as memory:
            count = sum(1 for _ in written)
        texts_per_s = count * settings.rows_per_part / (time.perf_counter() - begun)
        if name == "ray":
            ray.disconnect()
        if parts.totals.rows != settings.texts or not output.finish(parts.totals):
            raise SystemExit(f"{name}: expected {settings.texts} texts, got {parts.totals.rows}")
        second, last = memory.thirds()
        print(f"{name:5} {texts_per_s:11,.0f} texts/s, {second:.1f} MiB, then {last:.1f} MiB", flush=True)
        values = {"texts_per_s_p50": round(texts_per_s), "runs": 1, "model": "simulated"}
        sizes = {"mib_second_third": round(second, 1), "mib_last_third": round(last, 1)}
        rows.append(row(settings, name, workers=workers, **values, **sizes))
    return rows, all(entry["mib_last_third"] <= MOST_GROWTH * entry["mib_second_third"] for entry in rows)


def run_here(opened: Opened, missing: Iterator[tuple[int, Iterator[Any]]]) -> Iterator[int]:
    write = opened()
    return (write(*part) for part in missing)


def run_on_ray(opened: Opened, missing: Iterator[tuple[int, Iterator[Any]]]) -> Iterator[int]:
    ray.connect()
    tasks = ((number, list(rows)) for number, rows in missing)
    return ray.run_tasks(opened, tasks, ray.Workers(WORKERS, 1, 0))


class Memory:
    """Samples the private memory of this process and all below it, in MiB, in a thread."""

    def __init__(self, seconds: float = 0.2) -> None:
        self._seconds, self._samples, self._ends = seconds, list[float](), threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._ends.wait(self._seconds):
            self._samples.append(sum(map(private_mib, descendants(os.getpid()))))

    def thirds(self) -> tuple[float, float]:
        """The medians of the second and of the last third of the run."""
        if len(self._samples) < 6:
            raise SystemExit("stream: expected more --texts, for a run of some seconds")
        count = len(self._samples) // 3
        return statistics.median(self._samples[count : 2 * count]), statistics.median(self._samples[2 * count :])

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def descendants(process: int) -> Iterator[int]:
    yield process
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # it has ended
            continue
        for child in children:
            yield from descendants(int(child))


def private_mib(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


if __name__ == "__main__":
    raise SystemExit(main())
