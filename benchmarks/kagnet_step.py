"""Times KagNet's training step and the part of it that the graph takes.

    python benchmarks/kagnet_step.py                                     BERT-base, 32 questions, on a GPU
    python benchmarks/kagnet_step.py --cuda-graph                        the GPU's time, without the host's
    python benchmarks/kagnet_step.py --device cpu --questions 2

The step (forward, backward, clipping, AdamW) of BERT-base with a graph is timed in turns with that of BERT-base without
one, for the same packed texts; the graph's part is the difference. Graphs are random, of the size that questions of
CommonsenseQA have: 7 concepts in a question, 1 in an answer, up to 12 paths of 1 to 3 edges per pair. The vectors of
the concepts are frozen, as with TransE's. ``--products`` times only the mean over neighbours: with embedding_bag, as
the model computes it, with torch's sparse GEMM in COO and CSR form, and with a gather and index_add.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fasttfm import models, optim
from fasttfm.bench.steps import captured, timed_in_turns
from fasttfm.bench.timing import device_name
from fasttfm.data.graphs import ConceptPath, Pair, SchemaGraph
from fasttfm.nn.graph import GraphBatch, neighbour_mean
from fasttfm.tasks.commonsense import collate_graphs

CHOICES, CONCEPTS, RELATIONS = 5, 5000, 34
QUESTION_CONCEPTS, PATHS = 7, 12


def random_graph(random: np.random.Generator) -> SchemaGraph:
    concepts = random.choice(CONCEPTS, 70, replace=False).tolist()
    edges: set[tuple[int, int]] = set()
    pairs = []
    answer = QUESTION_CONCEPTS
    for question in range(QUESTION_CONCEPTS):
        paths = []
        for _ in range(PATHS):
            inside = random.choice(np.arange(answer + 1, len(concepts)), int(random.integers(0, 3)), replace=False)
            nodes = [question, *inside.tolist(), answer]
            edges |= {(min(pair), max(pair)) for pair in itertools.pairwise(nodes)}
            relations = tuple(random.integers(0, 2 * RELATIONS, len(nodes) - 1).tolist())
            paths.append(ConceptPath(tuple(concepts[node] for node in nodes), relations))
        pairs.append(Pair(question, answer, paths))
    return SchemaGraph(concepts, sorted(edges), pairs)


def steps(device: torch.device, questions: int, length: int) -> dict[str, Callable[[], None]]:
    """The training step with a graph, and without one."""
    random = np.random.default_rng(0)
    graph = collate_graphs([random_graph(random) for _ in range(questions * CHOICES)]).to(device)
    sequences = questions * CHOICES
    ids = torch.randint(1000, 30000, (sequences * length,), device=device)
    bounds = torch.arange(0, len(ids) + 1, length, dtype=torch.int32, device=device)
    inputs = {"input_ids": ids, "cu_seqlens": bounds, "max_seqlen": length, "num_choices": CHOICES}
    labels = torch.randint(0, CHOICES, (questions,), device=device)
    config = models.BertKagNetConfig.named(
        "base", graph_concepts=CONCEPTS, graph_relations=2 * RELATIONS, freeze_concepts=True
    )
    with_graph = models.BertKagNet(config).to(device)
    plain = models.BertForMultipleChoice(models.BertConfig.named("base")).to(device)

    def step_of(model: torch.nn.Module, **more: GraphBatch) -> Callable[[], None]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = optim.AdamW(trained, lr=1e-5)

        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                loss: Tensor = model(**inputs, **more, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return {"with the graph": step_of(with_graph, graph=graph), "text only": step_of(plain)}


def products(device: torch.device, questions: int) -> dict[str, Callable[[], None]]:
    """The mean over neighbours in several ways, forward and backward."""
    random = np.random.default_rng(0)
    graph = collate_graphs([random_graph(random) for _ in range(questions * CHOICES)]).to(device)
    count = len(graph.concepts)
    h = torch.randn(count, 100, device=device, requires_grad=True)
    upstream = torch.randn(count, 100, device=device)
    node, neighbour = graph.edges
    starts, scales = graph.starts, graph.scales[0]

    def run(mean: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            h.grad = None
            mean().backward(upstream)

        return call

    def coo() -> Tensor:
        size = (count, count)
        return torch.sparse.mm(
            torch.sparse_coo_tensor(graph.edges, scales, size, is_coalesced=True, check_invariants=False), h
        )

    def csr() -> Tensor:
        size = (count, count)
        return torch.sparse_csr_tensor(starts, neighbour, scales, size, check_invariants=False) @ h

    def gather() -> Tensor:
        return torch.zeros_like(h).index_add(0, node, h.index_select(0, neighbour) * scales[:, None])

    def bag() -> Tensor:
        return neighbour_mean(h, graph)

    return {"embedding_bag": run(bag), "sparse COO": run(coo), "sparse CSR": run(csr), "gather, index_add": run(gather)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens of a question with an answer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cuda-graph", action="store_true", help="steps are CUDA graphs: the host's time is left out")
    parser.add_argument("--products", action="store_true", help="time only the mean over neighbours")
    parsed = parser.parse_args()
    device = torch.device(parsed.device)
    torch.manual_seed(0)
    print(f"{device_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    if parsed.products:
        calls = products(device, parsed.questions)
    else:
        calls = steps(device, parsed.questions, parsed.length)
        if parsed.cuda_graph:
            calls = {name: captured(call) for name, call in calls.items()}
    timed = timed_in_turns(calls, device, rounds=parsed.rounds)
    times = {name: result.milliseconds for name, result in timed.items()}
    if not parsed.products:
        times["graph"] = times["with the graph"] - times["text only"]
    for name, milliseconds in times.items():
        print(f"{name:20} {milliseconds:10.3f} ms")
    if "graph" in times:
        print(f"share of the graph   {times['graph'] / times['with the graph']:10.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
