"""Projects data-parallel training to many GPUs from a step on one of them.

    python benchmarks/scaling_model.py --out benchmarks/results    the projection: rows and a chart
    python benchmarks/scaling_model.py --check --ranks 2 4    predictions against steps on this machine
    python benchmarks/scaling_model.py --measure timeline.json    the timeline of a step on this machine's device

The model: gradients become ready during the backward in the order of ``Timeline``; DDP collects them in buckets and
all-reduces one bucket after the other while the backward continues. A step ends with the optimizer, after the last
bucket. An all-reduce in a node takes 2 (g - 1) / g of the bytes at NVLink's rate; among n nodes each GPU sends its
part, 1 / g of the bytes, 2 (n - 1) / n times over its own network adapter. Every step waits for the slowest rank: with
times that vary as those of one GPU do, the largest of N.

``--check`` predicts steps of processes on this machine, which talk by gloo over the loopback interface. The parts are
measured without communication (each rank trains a model of its own, all at the same time, because they share cores and
memory) and all-reduces without training.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fasttfm import __version__
from fasttfm.bench.timing import device_name
from fasttfm.data import Batch
from fasttfm.models import BertConfig, BertForMaskedLM
from fasttfm.models.objectives import MaskedLM
from fasttfm.train import (
    Objective,
    OptimizerSettings,
    Schedule,
    ScheduleSettings,
    StepSettings,
    Trainer,
    make_optimizer,
)
from fasttfm.train.distributed import World, join, share_out

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # DDP's limits
# Of a profile of BERT-large's step on an H200 (docs/training_step.md): the backward's part of the step without the
# optimizer, and the optimizer's time for a parameter.
BACKWARD, OPTIMIZER_PER_PARAMETER = 0.64, 2.8e-3 / 335e6
# Published for eight H100, with communication (MLPerf Training v3.1, BERT-large, FP8): sequences per second and GPU.
MLPERF = 970.0
WAITS = 2  # small all-reduces of a step of Trainer: the counts of its losses, and their sums
# Measured steps: title, results file, values of columns, of which the fastest row is taken.
STEPS = (
    ("BERT-large 64x512, bf16", "eager_steps", {"padded": "False", "contender": "fasttfm-fast"}),
    ("BERT-large 64x512, FP8", "fp8_step", {"padded": "False", "contender": "fasttfm-fp8-graph"}),
    ("BERT-large 64x512 padded, FP8", "fp8_step", {"padded": "True", "contender": "fasttfm-fp8-graph"}),
)
SEQUENCES = 64
COLUMNS = (
    *("case", "gpus", "projected_ms", "projected_ms_without_waiting", "exposed_ms", "sequences_per_s_per_gpu"),
    *("efficiency", "measured_step_ms", "nvlink_gb_per_s", "network_gb_per_s", "source", "fasttfm_version"),
)


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """A step on one rank, in seconds from its start."""

    ready: tuple[float, ...]  # of each parameter's gradient, ascending
    bytes: tuple[int, ...]  # of the same gradients
    backward_end: float
    step: float
    deviation: float = 0.0  # the standard deviation of ``step``


@dataclass(frozen=True)
class Network:
    """A cluster. Rates are bytes per second and GPU in one direction, latencies are seconds of one hop."""

    gpus_per_node: int = 8
    nvlink: float = 360e9  # of 450 GB/s
    adapter: float = 45e9  # of 400 Gbit/s InfiniBand
    nvlink_latency: float = 2e-6
    adapter_latency: float = 5e-6
    launch: float = 15e-6  # of an NCCL kernel

    def all_reduce(self, size: int, ranks: int) -> float:
        """The seconds of an all-reduce of ``size`` bytes."""
        if ranks == 1:
            return 0.0
        inside, nodes = min(ranks, self.gpus_per_node), -(-ranks // self.gpus_per_node)
        seconds = self.launch + 2 * (inside - 1) / inside * size / self.nvlink + 2 * (inside - 1) * self.nvlink_latency
        seconds += 2 * (nodes - 1) / nodes * size / inside / self.adapter
        return seconds + 2 * math.ceil(math.log2(nodes)) * self.adapter_latency


def buckets(timeline: Timeline) -> list[tuple[float, int]]:
    """DDP's buckets: when each is ready, and its bytes."""
    full: list[tuple[float, int]] = []
    size = 0
    for ready, count in zip(timeline.ready, timeline.bytes, strict=True):
        size += count
        if size >= (BUCKET if full else FIRST_BUCKET):
            full.append((ready, size))
            size = 0
    return [*full, (timeline.ready[-1], size)] if size else full


def step_time(timeline: Timeline, costs: Sequence[float], *, waits: float = 0.0, interference: float = 0.0) -> float:
    """The seconds of a step with communication, without waiting for slower ranks.

    Args:
        costs: The seconds of the all-reduce of each bucket.
        waits: The seconds of all-reduces before the forward and after the backward.
        interference: The fraction of an all-reduce's time by which it delays a backward that runs at the same time.
    """
    delay = sent = 0.0
    for (ready, _), cost in zip(buckets(timeline), costs, strict=True):
        begin = max(ready + delay, sent)
        delay += interference * min(cost, max(0.0, timeline.backward_end + delay - begin))
        sent = begin + cost
    backward_end = max(timeline.backward_end + delay, sent)
    return backward_end + (timeline.step - timeline.backward_end) + waits


def slowest(ranks: int, deviation: float) -> float:
    """How much longer than the mean the slowest of ``ranks`` takes, if times are normally distributed."""
    if ranks == 1 or deviation <= 0:
        return 0.0
    # Blom's approximation of the expected maximum.
    return deviation * statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


# ---- the projection --------------------------------------------------------------------------------------------------


def projection(gpus: Sequence[int], network: Network) -> list[dict[str, Any]]:
    """Rows of all measured steps, each with the same batch on every GPU."""
    rows = []
    for title, source, columns in STEPS:
        timeline = h200_timeline(source, columns)
        for count in gpus:
            costs = [network.all_reduce(size, count) for _, size in buckets(timeline)]
            bare = step_time(timeline, costs, waits=WAITS * network.all_reduce(64, count))
            step = bare + slowest(count, timeline.deviation)
            exposed = max(0.0, bare - timeline.step)
            values = (title, count, *(round(1e3 * seconds, 3) for seconds in (step, bare, exposed)))
            rate, efficiency = SEQUENCES / step, timeline.step / step
            origin = (round(1e3 * timeline.step, 3), network.nvlink / 1e9, network.adapter / 1e9)
            values += (round(rate, 1), round(efficiency, 4), *origin, f"nvidia-h200-{source}.csv", __version__)
            rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def h200_timeline(source: str, selected: dict[str, str]) -> Timeline:
    """A timeline of committed rows. Layers are alike, so their gradients are ready at equal intervals, the head's first
    and those of the embeddings at the end of the backward."""
    selected = {"model": "bert-large", **selected}
    with (RESULTS / f"nvidia-h200-{source}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[name] == value for name, value in selected.items())]
    fastest = min(rows, key=lambda row: float(row["ms_p50"]))
    p20, p50, p80 = (float(fastest[name]) / 1e3 for name in ("ms_p20", "ms_p50", "ms_p80"))
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig.named("large"))
    named = list(model.named_parameters())
    optimizer = OPTIMIZER_PER_PARAMETER * sum(parameter.numel() for _, parameter in named)
    backward = BACKWARD * (p50 - optimizer)
    end = p50 - optimizer
    layers = 1 + max(layer_of(name) for name, _ in named)
    gradients = []
    for name, parameter in named:
        # The word embeddings are also the head's: they are ready with the other embeddings.
        left = layer_of(name) if layer_of(name) >= 0 else 0 if "embeddings" in name else layers
        gradients.append((end - backward * left / layers, 4 * parameter.numel()))
    gradients.sort(key=lambda gradient: gradient[0])
    ready, sizes = zip(*gradients, strict=True)
    return Timeline(ready, sizes, end, p50, deviation_of(p20, p80))


def deviation_of(p20: float, p80: float) -> float:
    """The standard deviation of a normal distribution with these percentiles."""
    return (p80 - p20) / 1.683


def layer_of(name: str) -> int:
    """The number of the layer that has a parameter; -1 for embeddings and heads."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def mlperf(network: Network) -> str:
    """The projection of eight GPUs next to MLPerf's."""
    title = "BERT-large 64x512 padded, FP8"
    (row,) = [row for row in projection([8], network) if row["case"] == title]
    rate = row["sequences_per_s_per_gpu"]
    return (
        f"{title}: {rate:,.0f} sequences/s per GPU with 8 H200 projected; MLPerf's 8 H100 have about {MLPERF:,.0f}: "
        f"ratio {rate / MLPERF:.2f}"
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for title in dict.fromkeys(row["case"] for row in rows):
        chosen = [row for row in rows if row["case"] == title]
        gpus = [row["gpus"] for row in chosen]
        (line,) = left.plot(gpus, [100 * row["efficiency"] for row in chosen], marker="o", markersize=3, label=title)
        bare = [100 * row["measured_step_ms"] / row["projected_ms_without_waiting"] for row in chosen]
        left.plot(gpus, bare, linestyle=":", color=line.get_color())
        rates = [row["sequences_per_s_per_gpu"] * row["gpus"] for row in chosen]
        right.loglog(gpus, rates, marker="o", markersize=3, color=line.get_color(), base=2)
    left.set_xscale("log", base=2)
    left.set(xlabel="GPUs", ylabel="% of one GPU's rate", title="Projected efficiency (dotted: ranks equally fast)")
    left.set_ylim(80, 101)
    left.legend(fontsize=8, frameon=False, loc="lower left")
    right.set(xlabel="GPUs", ylabel="sequences/s", title="Projected sequences per second")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# ---- measured parts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """The model and batch that ``--check`` and ``--measure`` time."""

    size: str
    sequences: int
    length: int
    steps: int


def trainer_of(size: Size, world: World) -> tuple[Trainer, Batch]:
    torch.manual_seed(0)
    config = BertConfig.named(size.size)
    module: Any = MaskedLM(BertForMaskedLM(config).to(world.device))
    optimizer = make_optimizer(module, OptimizerSettings())
    shared = share_out(module, world)
    schedule = Schedule(optimizer, ScheduleSettings(steps=1 << 20))
    settings = StepSettings(precision="bfloat16" if world.device.type == "cuda" else "float32")
    trainer = Trainer(shared, Objective.of(module), optimizer, schedule, settings, world=world)
    tokens = size.sequences * size.length
    positions = torch.arange(0, tokens, 7)
    batch = Batch(
        input_ids=torch.randint(1000, config.vocab_size, (tokens,)),
        token_type_ids=None,
        cu_seqlens=torch.arange(0, tokens + 1, size.length, dtype=torch.int32),
        max_seqlen=64 * math.ceil(size.length / 64),
        positions=positions,
        labels=torch.randint(1000, config.vocab_size, (len(positions),)),
        sentence_labels=None,
        tokens=tokens,
        predictions=len(positions),
    )
    return trainer, batch


def measured_timeline(trainer: Trainer, batch: Batch, steps: int) -> Timeline:
    """The medians of some steps without communication."""
    cuda = trainer.world.device.type == "cuda"
    marks: dict[int, Any] = {}

    def now() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    parameters = [parameter for parameter in trainer.module.parameters() if parameter.requires_grad]
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: marks.__setitem__(index, now()))
        for index, parameter in enumerate(parameters)
    ]
    times: list[dict[int, float]] = []
    for number in range(steps + 2):
        marks.clear()
        begin = now()
        trainer.step([batch])
        marks[-1] = now()
        if cuda:
            torch.cuda.synchronize()
        if number >= 2:  # after warmup
            seconds = {key: begin.elapsed_time(mark) / 1e3 if cuda else mark - begin for key, mark in marks.items()}
            times.append(seconds)
    for hook in hooks:
        hook.remove()
    medians = {key: statistics.median(marked[key] for marked in times) for key in times[0]}
    step = medians.pop(-1)
    order = sorted(medians, key=lambda index: medians[index])
    fifths = statistics.quantiles((marked[-1] for marked in times), n=5) if len(times) > 1 else [0.0, 0.0]
    sizes = tuple(parameters[index].numel() * parameters[index].element_size() for index in order)
    return Timeline(
        tuple(medians[index] for index in order), sizes, medians[order[-1]], step, deviation_of(fifths[0], fifths[-1])
    )


def all_reduce_costs(sizes: Sequence[int], repeats: int) -> tuple[list[float], float]:
    """The seconds of all-reduces without training, and the fraction of them in which this process computes."""
    costs, busy, wall = {}, 0.0, 0.0
    for size in sorted(set(sizes)):
        tensor = torch.zeros(max(1, size // 4))
        dist.all_reduce(tensor)
        times = []
        dist.barrier()
        cpu = time.process_time()
        for _ in range(repeats):
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - begin)
        busy, wall = busy + time.process_time() - cpu, wall + sum(times)
        costs[size] = statistics.median(times)
    return [costs[size] for size in sizes], min(1.0, busy / wall)


def check_rank(rank: int, ranks: int, port: int, size: Size, results: Any) -> None:
    """One process of ``--check``: steps without communication, all-reduces without training, then steps with both."""
    values = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    torch.set_num_threads(1)
    world = join("cpu", "ddp")
    trainer, batch = trainer_of(size, World(world.device))
    dist.barrier()
    timeline = measured_timeline(trainer, batch, size.steps)
    dist.barrier()
    first = world.gather(asdict(timeline)) or [asdict(timeline)]
    shared = [Timeline(**first[0])]
    dist.broadcast_object_list(shared)  # all ranks time the all-reduces of the same buckets
    costs, busy = all_reduce_costs([64, *(count for _, count in buckets(shared[0]))], size.steps)
    del trainer
    trainer, batch = trainer_of(size, world)
    times = []
    for number in range(size.steps + 3):  # DDP makes its final buckets after the first step
        begin = time.perf_counter()
        trainer.step([batch])
        if number >= 3:
            times.append(time.perf_counter() - begin)
    results.put((rank, timeline, costs, busy, statistics.median(times)))
    world.leave()


def check(ranks: int, size: Size) -> dict[str, float]:
    """A predicted and a measured step of ``ranks`` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=check_rank, args=(rank, ranks, port, size, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    parts = sorted((results.get(timeout=600) for _ in processes), key=lambda part: part[0])
    for process in processes:
        process.join()
    timelines = [part[1] for part in parts]
    costs = [statistics.mean(values) for values in zip(*(part[2] for part in parts), strict=True)]
    # Where ranks have a core each and none is left, an all-reduce takes the time of the backward's core.
    busy = statistics.mean(part[3] for part in parts) if ranks >= (os.cpu_count() or 1) else 0.0
    options = {"waits": WAITS * costs[0], "interference": busy}
    step = statistics.mean(step_time(timeline, adapted(costs[1:], timeline), **options) for timeline in timelines)
    step += slowest(ranks, statistics.mean(timeline.deviation for timeline in timelines))
    measured = statistics.mean(part[4] for part in parts)
    return {
        "ranks": ranks,
        "compute_ms": 1e3 * statistics.mean(timeline.step for timeline in timelines),
        "all_reduce_ms": 1e3 * sum(costs[1:]),
        "predicted_ms": 1e3 * step,
        "measured_ms": 1e3 * measured,
        "error": step / measured - 1,
    }


def adapted(costs: Sequence[float], timeline: Timeline) -> list[float]:
    """The costs for the buckets of a timeline; the order of gradients may differ a little from rank to rank."""
    count = len(buckets(timeline))
    return list(costs) if count == len(costs) else [sum(costs) / count] * count


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="predict and measure steps of processes on this machine")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--measure", type=Path, metavar="FILE", help="write the timeline of a step on this machine")
    parser.add_argument("--size", default="mini", help="of BERT, with --check and --measure (default: mini)")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1 << power for power in range(11)])
    parser.add_argument("--nvlink", type=float, default=Network.nvlink / 1e9, help="GB/s of a GPU in one direction")
    parser.add_argument("--network", type=float, default=Network.adapter / 1e9, help="GB/s of a GPU's network adapter")
    parser.add_argument("--out", type=Path, help="folder for rows and chart")
    arguments = parser.parse_args()
    size = Size(arguments.size, arguments.sequences, arguments.length, arguments.steps)
    if arguments.measure:
        trainer, batch = trainer_of(size, World(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
        timeline = {
            "device": device_name(trainer.world.device),
            **asdict(measured_timeline(trainer, batch, size.steps)),
        }
        arguments.measure.write_text(json.dumps(timeline, indent=1))
        return 0
    if arguments.check:
        return run_check(arguments, size)
    network = Network(nvlink=1e9 * arguments.nvlink, adapter=1e9 * arguments.network)
    rows = projection(arguments.gpus, network)
    for row in rows:
        print(f"{row['case']:32} {row['gpus']:5} GPUs: {row['projected_ms']:8.2f} ms, {row['efficiency']:.1%}")
    print(mlperf(network))
    if arguments.out:
        write(arguments.out / "nvidia-h200-scaling.csv", rows)
        draw(rows, arguments.out / "nvidia-h200-scaling.png")
    return 0


def run_check(arguments: argparse.Namespace, size: Size) -> int:
    load, rows = os.getloadavg()[0], []
    for ranks in arguments.ranks:
        row = check(ranks, size)
        print(
            f"{ranks} ranks: without communication {row['compute_ms']:.1f} ms, all-reduces {row['all_reduce_ms']:.1f} "
            f"ms; predicted {row['predicted_ms']:.1f} ms, measured {row['measured_ms']:.1f} ms: {row['error']:+.1%}",
            flush=True,
        )
        rounded = {name: round(value, 4) for name, value in row.items()}
        machine = {"device": device_name(torch.device("cpu")), "cores": os.cpu_count(), "load": round(load, 2)}
        rows.append({**rounded, **asdict(size), **machine, "fasttfm_version": __version__})
    if arguments.out:
        write(arguments.out / "cpu-scaling-check.csv", rows)
    return int(any(abs(row["error"]) > 0.15 for row in rows))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"rows: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
