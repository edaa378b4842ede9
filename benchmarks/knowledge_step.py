"""Times a training step of ERNIE (of Tsinghua University) and one of BERT on the same tokens.

    python benchmarks/knowledge_step.py --batch 64x256                      base, on a GPU; the aim is a ratio of 1.25
    python benchmarks/knowledge_step.py --batch 64x256 --cuda-graph         the GPU's time, without the host's
    python benchmarks/knowledge_step.py --size tiny --batch 8x128 --device cpu

A quarter of the tokens have an entity (--aligned). Steps are forward, backward and AdamW, with dropout, in bf16
autocast on a GPU. BERT is trained on masked LM and next sentence prediction, ERNIE also on its entities. The two
alternate, so that a change of clock rates affects both. Also printed: the ratio of their FLOPs in GEMMs and attention,
and on a GPU the number of kernels of a step.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fasttfm
from fasttfm.bench.steps import captured, timed_in_turns, training_step
from fasttfm.models import (
    BertConfig,
    BertForPreTraining,
    ErnieKnowledgeConfig,
    ErnieKnowledgeForPreTraining,
)
from fasttfm.models.ernie_knowledge import EntityTargets
from fasttfm.nn import AlignedEntities, KnowledgeLayer

ENTITIES = 100_000  # rows of the table
MASKED = 0.15


def batch_of(batch: int, length: int, aligned: float, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """The inputs of both models; BERT does not get those whose names begin with "entit"."""
    random = torch.Generator().manual_seed(0)
    tokens = batch * length
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32) * length
    positions = torch.randperm(tokens, generator=random)[: round(MASKED * tokens)].sort().values
    entities = torch.where(
        torch.rand(tokens, generator=random) < aligned, torch.randint(ENTITIES, (tokens,), generator=random), -1
    )
    inputs: dict[str, Any] = {
        "input_ids": torch.randint(5, vocabulary, (tokens,), generator=random),
        "cu_seqlens": cu_seqlens,
        "labels": torch.randint(5, vocabulary, (len(positions),), generator=random),
        "positions": positions,
        "next_sentence_label": torch.randint(2, (batch,), generator=random),
        "entities": AlignedEntities.of(entities, cu_seqlens, length),
        "entity_labels": EntityTargets.of(entities),
    }
    return {name: value.to(device) for name, value in inputs.items()} | {"max_seqlen": length}


def models_of(size: str, batch: int, length: int, aligned: float, device: torch.device) -> tuple[Any, Any, Any]:
    """BERT, ERNIE, and their inputs."""
    torch.manual_seed(0)
    bert = BertForPreTraining(BertConfig.named(size)).to(device)
    ernie = ErnieKnowledgeForPreTraining(ErnieKnowledgeConfig.named(size)).to(device)
    ernie.set_entities([""] * ENTITIES, torch.randn(ENTITIES, ernie.config.vector_size()))
    return bert, ernie, batch_of(batch, length, aligned, bert.config.vocab_size, device)


def step_of(model: Any, inputs: dict[str, Any], device: torch.device) -> Callable[[], None]:
    on_gpu = device.type == "cuda"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = fasttfm.optim.AdamW if on_gpu else torch.optim.AdamW
    optimizer = kind(trained, lr=1e-4, **({"weight_copies": True} if on_gpu else {"fused": True}))
    return training_step(lambda: model(**inputs).loss, optimizer, device)


def flops(model: Any, inputs: dict[str, Any], length: int) -> float:
    """FLOPs of forward and backward: GEMMs of the layers and heads, and attention."""
    tokens, predictions = len(inputs["input_ids"]), len(inputs["positions"])
    config, layers = model.config, model.encoder.encoder.in_order()
    width = config.hidden_size
    inner = 2.0 * tokens * (4 * width**2 + 2 * width * config.intermediate_size) + 4.0 * tokens * length * width
    total = len(layers) * inner + 2.0 * predictions * width * (width + config.vocab_size)
    count = inputs["entities"].count if "entities" in inputs else 0
    for layer in layers:
        if isinstance(layer, KnowledgeLayer):
            size = layer.entity_width
            total += 2.0 * count * size * config.intermediate_size * (1 if layer.last else 2)
            total += 8.0 * count * size**2 * (layer.entity_qkv is not None)
    if count:
        targets = inputs["entity_labels"]
        total += 2.0 * len(targets.labels) * config.vector_size() * (width + len(targets.candidates) + 1)
    return 3.0 * total


def kernels(step: Callable[[], None]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", choices=tuple(ErnieKnowledgeConfig.sizes))
    parser.add_argument("--batch", default="64x256", metavar="BxS", help="sequences and their length")
    parser.add_argument(
        "--aligned", type=float, default=0.25, metavar="FRACTION", help="fraction of the tokens with an entity"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cuda-graph", action="store_true", help="steps are CUDA graphs: the host's time is left out")
    parser.add_argument("--out", type=Path, metavar="CSV", help="write the row to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batch, length = map(int, arguments.batch.split("x"))
    bert, ernie, inputs = models_of(arguments.size, batch, length, arguments.aligned, device)
    plain = {name: value for name, value in inputs.items() if not name.startswith("entit")}
    steps = {"bert": step_of(bert, plain, device), "ernie": step_of(ernie, inputs, device)}
    if arguments.cuda_graph:
        steps = {name: captured(step) for name, step in steps.items()}
    timed = timed_in_turns(steps, device, rounds=arguments.steps)
    medians = {name: result.milliseconds for name, result in timed.items()}
    work = flops(ernie, inputs, length) / flops(bert, plain, length)
    row = {
        "size": arguments.size,
        "batch": arguments.batch,
        "aligned": arguments.aligned,
        "cuda_graph": arguments.cuda_graph,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "bert_ms": round(medians["bert"], 3),
        "ernie_ms": round(medians["ernie"], 3),
        "ratio": round(medians["ernie"] / medians["bert"], 3),
        "flops_ratio": round(work, 4),
    }
    if device.type == "cuda":
        row |= {f"{name}_kernels": kernels(step) for name, step in steps.items()}
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    if arguments.out is not None:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, row)
            writer.writeheader()
            writer.writerow(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
