"""Times a LoRA training step and a session with several adapters.

    python benchmarks/lora_step.py                                    BERT-base, 64 x 512 packed, r = 16, on a GPU
    python benchmarks/lora_step.py --targets query value              the modules that PEFT adapts by default
    python benchmarks/lora_step.py --sessions                         8 adapters in one batch
    python benchmarks/lora_step.py --layers 2 --batch 4 --sequence 64 --device cpu --rounds 3

The step is forward, backward and AdamW of the adapter; ``bound`` is forward and backward through the frozen encoder to
its embeddings, without any adapter; ``full`` trains all parameters. ``peft`` is PEFT's adapter on transformers' model
over padded batches with SDPA, ``peft-patched`` the same after ``fasttfm.patch``, ``peft-compile`` with torch.compile.
All are in bf16 autocast on a GPU, with fp32 weights and without dropout; lengths are spread evenly from S/8 to S (56%
real tokens). The contenders take turns; times are medians, on a CPU of processor time.

Sessions compute texts of these lengths: without adapters (``plain``), with one for all of them, and with one of 8 for
each of them.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fasttfm
from fasttfm import models, ops
from fasttfm.bench.steps import timed_in_turns, training_step
from fasttfm.bench.timing import device_name, percentiles
from fasttfm.inference import Session
from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Head
from fasttfm.models.lora import adapters_in, targets_of

CONTENDERS = ("lora", "bound", "full", "peft", "peft-patched", "peft-compile")
ADAPTERS = 8
COLUMNS = ("device", "model", "batch", "targets", "rank", "contender", "ms_p50", "ratio", "gib", "torch", "note")


def config_of(family: str, size: str, layers: int | None) -> Any:
    changes = {} if layers is None else {"num_hidden_layers": layers}
    config = FAMILIES[family].models[Head.NONE].config_class.named(size, **changes)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if name in vars(config):
            setattr(config, name, 0.0)
    return config


class Batch:
    """The same tokens, padded and packed."""

    def __init__(self, batch: int, sequence: int, vocabulary: int, device: torch.device) -> None:
        ids = torch.randint(5, vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(0))
        lengths = torch.linspace(sequence // 8, sequence, batch).round().int()
        mask = torch.arange(sequence) < lengths[:, None]
        self.ids, self.mask, self.packed = ids.to(device), mask.long().to(device), ids[mask].to(device)
        self.cu_seqlens = ops.cu_seqlens_from_lengths(lengths.tolist(), device=device)
        self.longest = int(lengths.max())
        self.texts = [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]


def loss_of(states: Tensor, mask: Tensor | None = None) -> Tensor:
    squares = states.float().square()
    return squares.mean() if mask is None else (squares * mask[..., None]).sum() / mask.sum() / states.shape[-1]


def ours(name: str, family: str, config: Any, batch: Batch, options: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model: Any = FAMILIES[family].models[Head.NONE](config).to(batch.ids.device).train()
    if name == "lora":
        models.add_adapter(model, options.rank, targets=options.targets)
    elif name == "bound":
        model.requires_grad_(False)
        model.embeddings.register_forward_hook(lambda *given: given[-1].requires_grad_())
    layout = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.longest}
    return model, lambda: loss_of(model(batch.packed, **layout).last_hidden_state)


def theirs(name: str, family: str, config: Any, batch: Batch, options: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    import peft
    import transformers

    torch.manual_seed(0)
    fields = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    kind, config_kind = FAMILIES[family].models[Head.NONE], type(config).__name__
    configured = getattr(transformers, config_kind)(**fields, attn_implementation="sdpa")
    model = getattr(transformers, kind.__name__)(configured).to(batch.ids.device)
    ours: Any = kind(config)
    models.add_adapter(ours, options.rank, targets=options.targets)
    blocks = {target.name: module.blocks for target, module in adapters_in(ours)}
    targets = [
        module
        for target in targets_of(ours)
        for module, block in zip(target.modules, target.blocks, strict=True)
        if block in blocks.get(target.name, ())
    ]
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=options.rank, target_modules=targets)).train()
    if name == "peft-patched":
        fasttfm.patch(adapted)
    called = torch.compile(adapted) if name == "peft-compile" else adapted
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
    return adapted, lambda: loss_of(called(**inputs).last_hidden_state, batch.mask)


def step_of(name: str, model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> Callable[[], object]:
    trained = [each for each in model.parameters() if each.requires_grad]
    if trained:
        return training_step(loss, torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda"), device)

    def forward_and_backward() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            value = loss()
        value.backward()

    return forward_and_backward


def of_processor(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of processor time, and no memory, of calls that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            begun = time.process_time()
            call()
            if number:
                seconds[name].append(time.process_time() - begun)
    return {name: (1e3 * percentiles(times)[1], 0.0) for name, times in seconds.items()}


def timed(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, tuple[float, float]]:
    if device.type == "cpu":
        return of_processor(calls, rounds)
    return {
        name: (each.milliseconds, each.memory) for name, each in timed_in_turns(calls, device, rounds=rounds).items()
    }


def sessions(family: str, config: Any, batch: Batch, options: Any, directory: Path) -> dict[str, Callable[[], object]]:
    """``encode`` of a session without adapters, and of one with 8."""
    torch.manual_seed(0)
    kind: Any = FAMILIES[family].models[Head.NONE]
    model = kind(config).eval()
    model.save_pretrained(directory / "model")
    for index in range(ADAPTERS):
        adapted = kind.from_pretrained(directory / "model")
        models.add_adapter(adapted, options.rank, targets=options.targets)
        for name, parameter in adapted.named_parameters():
            if name.endswith("lora_b"):
                nn.init.normal_(parameter, std=0.02)
        models.save_adapter(adapted, directory / str(index))
    names = [str(index) for index in range(ADAPTERS)]
    model = model.to(batch.ids.device)
    plain = Session(model)
    several = Session(model, adapters={name: directory / name for name in names})
    texts = batch.texts * options.repeats
    chosen = [names[index % ADAPTERS] for index in np.random.default_rng(0).permutation(len(texts))]
    return {
        "plain": lambda: plain.encode(texts),
        "one adapter": lambda: several.encode(texts, adapter="0"),
        f"{ADAPTERS} adapters": lambda: several.encode(texts, adapter=chosen),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="bert", choices=list(FAMILIES))
    parser.add_argument("--size", default="base", help="a named size of the family")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=["qkv", "out", "up", "down"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS[:-1], choices=CONTENDERS)
    parser.add_argument("--sessions", action="store_true", help="time sessions instead of training steps")
    parser.add_argument("--repeats", type=int, default=8, help="how often a session gets the batch's texts in one call")
    parser.add_argument("--csv", type=Path, help="append rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    config = config_of(options.family, options.size, options.layers)
    batch = Batch(options.batch, options.sequence, config.vocab_size, device)
    model_name = f"{options.family}-{options.size}" + (f"-{options.layers}-layers" if options.layers else "")
    shape = f"{options.batch}x{options.sequence}"
    print(f"{device_name(device)}, torch {torch.__version__}: {model_name}, {shape}, {len(batch.packed)} tokens")
    with tempfile.TemporaryDirectory() as directory:
        if options.sessions:
            calls = sessions(options.family, config, batch, options, Path(directory))
        else:
            calls = {}
            for name in options.contenders:
                make = theirs if name.startswith("peft") else ours
                calls[name] = step_of(name, *make(name, options.family, config, batch, options), device)
        found = timed(calls, device, options.rounds)
    first = "plain" if options.sessions else "bound" if "bound" in found else next(iter(found))
    about = (device_name(device), model_name, shape, " ".join(options.targets), options.rank)
    rows = []
    for name, (milliseconds, memory) in found.items():
        ratio = milliseconds / found[first][0]
        numbers = (f"{milliseconds:.3f}", f"{ratio:.3f}", f"{memory:.2f}")
        rows.append((*about, name, *numbers, torch.__version__, f"ratio to {first}"))
    for row in rows:
        print(f"{row[5]:16} {row[6]:>12} ms {row[7]:>8}x {row[8]:>8} GiB", flush=True)
    if options.csv is not None:
        is_new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows] if is_new else rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
