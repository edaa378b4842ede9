"""Load on servers of text embeddings: requests per second and latencies of ``fasttfm serve`` and of its peers.

    python benchmarks/serve_load.py --model all-MiniLM-L6-v2 --infinity infinity_emb --out benchmarks/results
    python benchmarks/serve_load.py --random bert-base --device cuda --seconds 10 --out benchmarks/results
    python benchmarks/serve_load.py --url http://127.0.0.1:8080 --clients 32 --seconds 10

The first two start the servers themselves, on 127.0.0.1, and take turns with them in several rounds. The contenders of
a machine are measured in one run:

    closed loop    C clients, each of which sends its next request once it has the answer (C = 1 and --clients)
    open loop      requests at a given rate, whether or not answers come: latency against load
    texts          32 texts a request in base64, against ``Session.encode`` of the same texts in this process
    added          one client and one text, against the session's own time for it
    tokens         the time to the first token of a stream, against the session's own (--random gpt2)
    soak           mixed traffic with disconnections, malformed bodies, overload and reloads (--soak SECONDS)

Rows go to ``<machine>-serve.csv``, and the latencies against the load to ``<machine>-serve.png``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serve_client import Measured, closed_loop, open_loop
from serve_contenders import Contender, contenders, random_model, run_async, sentences

_TEXTS = 32  # of a request with several
_WARM_SECONDS = 0.4


@dataclass
class Row:
    """A result: ``per_second`` counts requests, or texts where a request has several."""

    part: str
    contender: str
    load: str
    requests: int
    per_second: float
    ms_p50: float
    ms_p90: float
    ms_p99: float
    errors: int
    note: str = ""
    model: str = ""
    device: str = ""
    versions: str = ""


def row_of(measured: Measured, part: str, contender: str, load: str, texts: int = 1, note: str = "") -> Row:
    p50, p90, p99 = np.percentile(measured.latencies or [np.nan], [50, 90, 99]) * 1e3
    rate = len(measured.latencies) * texts / measured.seconds
    numbers = [round(float(number), 3) for number in (rate, p50, p90, p99)]
    return Row(part, contender, load, len(measured.latencies), *numbers, measured.errors, note)


# ---- parts -----------------------------------------------------------------------------------------------------------


def single_bodies(texts: list[str], name: str) -> list[bytes]:
    return [json.dumps({"input": text, "model": name}).encode() for text in texts]


def warm_up(server: Contender, texts: list[str], most: int) -> None:
    """Batches of all sizes, so that no kernel is compiled and no graph captured while others are measured."""
    bodies = single_bodies(texts, server.model)
    for clients in sorted({1, 2, 3, *(size * factor for size in (4, 8, 16, 32, 64) for factor in (1, 1.5)), most}):
        if clients <= most:
            run_async(closed_loop(server.port, "/v1/embeddings", bodies, int(clients), _WARM_SECONDS))


def run_singles(options: argparse.Namespace, servers: list[Contender], texts: list[str]) -> list[Row]:
    """Closed loops of one client and of ``--clients``, the servers in turns."""
    rows = []
    for server in servers:
        warm_up(server, texts, max(options.clients))
    for clients in sorted({1, *options.clients}):
        totals = {server.name: Measured(0.0) for server in servers}
        for _ in range(options.rounds):
            for server in servers:
                bodies = single_bodies(texts, server.model)
                loop = closed_loop(server.port, "/v1/embeddings", bodies, clients, options.seconds / options.rounds)
                totals[server.name].add(run_async(loop))
        for name, total in totals.items():
            rows.append(row_of(total, "closed loop, single texts", name, f"{clients} clients"))
            print(rows[-1], flush=True)
    return rows


def run_open(options: argparse.Namespace, server: Contender, texts: list[str], best: float) -> list[Row]:
    """Latency against load, at fractions of the closed loop's rate."""
    rows = []
    for fraction in (0.25, 0.5, 0.75, 0.9):
        rate = best * fraction
        bodies = single_bodies(texts, server.model)
        measured = run_async(open_loop(server.port, "/v1/embeddings", bodies, rate, options.seconds))
        rows.append(
            row_of(measured, "open loop, single texts", server.name, f"{rate:.1f}/s", note=f"{fraction:g} of closed")
        )
        print(rows[-1], flush=True)
    return rows


def run_texts(options: argparse.Namespace, server: Contender, texts: list[str], session: Any) -> list[Row]:
    """32 texts a request in base64 and ``Session.encode`` of the same texts, in turns. The session's process computes
    nothing meanwhile; both have all cores."""
    groups = [texts[first : first + _TEXTS] for first in range(0, len(texts) - _TEXTS + 1, _TEXTS)]
    bodies = [
        json.dumps({"input": group, "model": server.model, "encoding_format": "base64"}).encode() for group in groups
    ]
    encode, served = Measured(0.0), Measured(0.0)
    for number in range(options.rounds):
        share = options.seconds / options.rounds
        begun = time.perf_counter()
        while (now := time.perf_counter()) < begun + share:
            session.encode(groups[(len(encode.latencies) + number) % len(groups)])
            encode.latencies.append(time.perf_counter() - now)
        encode.seconds += time.perf_counter() - begun
        served.add(run_async(closed_loop(server.port, "/v1/embeddings", bodies, options.text_clients, share)))
    rows = [
        row_of(encode, "32 texts a request", "Session.encode", "1 caller", _TEXTS),
        row_of(served, "32 texts a request", server.name, f"{options.text_clients} clients", _TEXTS),
    ]
    rows[1].note = f"{rows[1].per_second / rows[0].per_second:.1%} of encode's texts/s"
    for row in rows:
        print(row, flush=True)
    return rows


def run_added(options: argparse.Namespace, server: Contender, texts: list[str], session: Any) -> list[Row]:
    """One client and one text, and the session's own time for it, in short turns."""
    bodies = single_bodies(texts, server.model)
    submitted, served = Measured(0.0), Measured(0.0)
    for number in range(4 * options.rounds):
        share = options.seconds / options.rounds / 8
        begun = time.perf_counter()
        while (now := time.perf_counter()) < begun + share:
            session.submit(texts[(len(submitted.latencies) + number) % len(texts)]).result()
            submitted.latencies.append(time.perf_counter() - now)
        submitted.seconds += time.perf_counter() - begun
        served.add(run_async(closed_loop(server.port, "/v1/embeddings", bodies, 1, share)))
    rows = [
        row_of(submitted, "one text", "Session.submit", "1 caller"),
        row_of(served, "one text", server.name, "1 client"),
    ]
    rows[1].note = f"{rows[1].ms_p50 - rows[0].ms_p50:.3f} ms added at p50"
    for row in rows:
        print(row, flush=True)
    return rows


# ---- rows and chart --------------------------------------------------------------------------------------------------


def write(rows: list[Row], options: argparse.Namespace, name: str) -> None:
    """Adds the machine to rows, writes them, and draws the chart."""
    import csv

    import torch

    from fasttfm import __version__
    from fasttfm.bench.timing import device_name, file_stem

    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    for row in rows:
        row.model, row.device = row.model or name, device_name(device)
        row.versions = f"fasttfm {__version__}, torch {torch.__version__}"
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{file_stem(device)}-serve.csv"
    kept = []
    if path.exists():
        with path.open(newline="") as file:
            measured = {(row.part, row.model) for row in rows}
            kept = [row for row in csv.DictReader(file) if (row["part"], row["model"]) not in measured]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows([*kept, *map(asdict, rows)])
    print(path)
    _draw(rows, path.with_suffix(".png"), name)


def _draw(rows: list[Row], path: Path, name: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no chart: matplotlib is not installed")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.part == "open loop, single texts"]
    if not shown:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for contender in dict.fromkeys(row.contender for row in shown):
        line = [row for row in shown if row.contender == contender]
        for kind, style in (("ms_p50", "-o"), ("ms_p99", "--o")):
            axes.plot([row.per_second for row in line], [getattr(row, kind) for row in line], style,
                      label=f"{contender}, {kind.removeprefix('ms_')}")  # fmt: skip
    axes.set(xlabel="requests per second", ylabel="latency, ms", title=f"{name}, single texts, open loop", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(path)


def summary(rows: list[Row]) -> list[str]:
    """What the rows show, a line for each comparison."""
    lines = []
    closed = [row for row in rows if row.part.startswith("closed")]
    for load in dict.fromkeys(row.load for row in closed):
        singles = [row for row in closed if row.load == load]
        ours = next((row for row in singles if row.contender.startswith("fasttfm")), None)
        if ours is None:
            continue
        lines.append(f"{load}, single texts: {ours.per_second:,.0f} requests/s, p99 {ours.ms_p99:.1f} ms")
        best = max((row for row in singles if row is not ours), key=lambda row: row.per_second, default=None)
        if best is not None:
            ratio = ours.per_second / best.per_second
            lines.append(f"  {ratio:.2f} times {best.contender} ({best.per_second:,.0f}/s, p99 {best.ms_p99:.1f} ms)")
    half = [row for row in rows if row.part.startswith("open") and row.note.startswith("0.5")]
    lines += [f"half of that, {row.contender}: {row.load}, p99 {row.ms_p99:.1f} ms" for row in half]
    noted = ("32 texts a request", "one text", "time to the first token", "soak")
    lines += [f"{row.part}: {row.note}" for row in rows if row.part in noted and row.contender.startswith("fasttfm")]
    return lines


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint directory")
    parser.add_argument("--random", choices=("bert-base", "minilm"), help="a model with random weights instead")
    parser.add_argument(
        "--gpt", action="store_true", help="also the time to the first token of a GPT-2 (random weights)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "int8"), help="of fasttfm's server")
    parser.add_argument("--processes", type=int, default=1, help="of fasttfm's server")
    parser.add_argument("--infinity", metavar="PROGRAM", help="infinity_emb, whose engines are measured too")
    parser.add_argument("--engines", default="torch,optimum", help="engines of infinity")
    parser.add_argument("--url", help="a server that runs; only its closed loops are measured")
    parser.add_argument("--clients", type=int, nargs="+", default=[32], help="clients of the closed loops")
    parser.add_argument("--text-clients", type=int, default=4, help="clients with 32 texts a request")
    parser.add_argument("--tokens", type=int, help="the length of texts; by default sentences of 5 to 60 tokens")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the contenders")
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    options = parsed()
    texts = sentences(options.tokens)
    if options.url:
        server = Contender(options.url, int(options.url.rpartition(":")[2].strip("/")), "")
        bodies = [json.dumps({"input": text}).encode() for text in texts]
        for clients in sorted({1, *options.clients}):
            loop = closed_loop(server.port, "/v1/embeddings", bodies, clients, options.seconds)
            print(row_of(run_async(loop), "closed loop, single texts", options.url, f"{clients} clients"))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or random_model(options.random or "minilm", Path(scratch))
        rows: list[Row] = []
        with contenders(options, folder) as servers:
            ours = servers[0]
            rows += run_singles(options, servers, texts)
            rates = {
                server.name: max(row.per_second for row in rows if row.contender == server.name) for server in servers
            }
            for contender in (candidate for candidate in servers if rates[candidate.name]):
                rows += run_open(options, contender, texts, rates[contender.name])
            for contender in servers[1:]:
                contender.stop()
            rows += _with_session(options, folder, ours, texts)
            if options.gpt:
                rows += _first_tokens(options, Path(scratch))
            if options.soak:
                from serve_soak import soak

                ours.stop()
                rows += [Row(**values) for values in soak(options, folder, texts)]
        write(rows, options, folder.name)
    print(*summary(rows), sep="\n")
    return int(any(row.errors for row in rows if row.part != "open loop, single texts"))


def _with_session(options: argparse.Namespace, folder: Path, server: Contender, texts: list[str]) -> list[Row]:
    from serve_contenders import session_of

    with session_of(options, folder) as session:
        session.encode(texts[:_TEXTS])
        return run_texts(options, server, texts, session) + run_added(options, server, texts, session)


def _first_tokens(options: argparse.Namespace, scratch: Path) -> list[Row]:
    from serve_soak import first_tokens

    return [Row(**values) for values in first_tokens(options, scratch)]


if __name__ == "__main__":
    raise SystemExit(main())
