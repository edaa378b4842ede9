"""Times a training step and inference of the families of models, against transformers.

    python benchmarks/family_step.py                                ModernBERT-base, 64 x 1024 packed, on a GPU
    python benchmarks/family_step.py --calls inference --full --batch 1 --sequence 8192
    python benchmarks/family_step.py --calls inference --full --family qwen3 --size 0.6b --batch 1 --sequence 512
    python benchmarks/family_step.py --family all --calls step inference --batch 16 --sequence 512 --contenders \\
        fasttfm hf --rounds 5 --append benchmarks/results          a row of each family for each call, on a GPU
    python benchmarks/family_step.py --family all --calls step inference --batch 4 --sequence 128 --contenders \\
        fasttfm hf --rounds 5 --layers 2 --vocabulary 8192 --device cpu --append benchmarks/results

The step is forward, backward and AdamW with the configuration's dropout, in bf16 autocast with fp32 weights on a GPU
and in fp32 on a CPU; inference, of the states of the last layer, is in bf16 or fp32. Lengths are spread evenly from S/8
to S (56% real tokens), or all S with ``--full``; the head is that for masked tokens (15% of the tokens are predicted),
for next tokens or for labels of tokens. ``hf`` and ``hf-compile`` are transformers over padded batches, with SDPA if
the family has it; ``hf-flash`` gets the same packed tokens as ours, through ``attn_implementation="fasttfm_flash"``;
``hf-patched`` is transformers' model after ``fasttfm.patch``. The contenders take turns; times are medians.
``--profile`` prints the kernels of one call instead.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fasttfm
from fasttfm import models, ops, optim
from fasttfm.bench.steps import Timed, print_times, timed_in_turns, training_step
from fasttfm.bench.timing import device_name, file_stem
from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Head

CONTENDERS = ("fasttfm", "hf", "hf-compile", "hf-flash", "hf-patched")
COLUMNS = ("device", "case", "contender", "ms_p50", "peak_gib", "torch", "transformers")
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # what configurations call their number
PREDICTED = 0.15
HEADS = (Head.MASKED_LM, Head.CAUSAL_LM, Head.TOKEN_CLASSIFICATION)
# The size of each family on a GPU: the first of these that it has.
PREFERRED = ("base", "150m", "210m", "270m", "0.6b", "small", "large", "tiny")
SIZES = {  # of families that transformers has and that read text (benchmarks/vit_step.py measures ViT)
    name: next(size for size in PREFERRED if size in family.sizes)
    for name, family in FAMILIES.items()
    if family.tokenizer is not None and name not in ("ernie_knowledge", "gpt3")
}


class Batch:
    """The same tokens, padded and packed."""

    def __init__(self, batch: int, sequence: int, vocabulary: int, device: torch.device, *, padded: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, vocabulary, (batch, sequence), generator=generator)
        lengths = torch.linspace(sequence // 8 if padded else sequence, sequence, batch).round().int()
        mask = torch.arange(sequence) < lengths[:, None]
        chosen = (torch.rand(batch, sequence, generator=generator) < PREDICTED) & mask
        self.ids, self.mask = ids.to(device), mask.long().to(device)
        self.packed = ids[mask].to(device)
        self.positions = chosen[mask].nonzero().squeeze(1).to(device)
        self.cu_seqlens = ops.cu_seqlens_from_lengths(lengths.tolist(), device=device)
        self.longest = int(lengths.max())
        self.token_positions = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)
        self.targets = {  # of each head, of padded batches
            Head.MASKED_LM: torch.where(chosen, ids, -100).to(device),
            Head.CAUSAL_LM: torch.where(mask, ids, -100).to(device),
            Head.TOKEN_CLASSIFICATION: torch.where(mask, ids % 2, -100).to(device),
        }

    def labels(self, head: Head, *, packed: bool) -> dict[str, Tensor]:
        """The arguments from which a model computes its loss."""
        padded = self.targets[head]
        if not packed:
            return {"labels": padded}
        labels = padded[self.mask.bool()]
        if head is Head.MASKED_LM:
            return {"labels": labels[self.positions], "positions": self.positions}
        return {"labels": labels}


def head_of(family: str) -> Head:
    return next(head for head in HEADS if head in FAMILIES[family].models)


def model_of(name: str, family: str, config: Any, device: torch.device) -> Any:
    torch.manual_seed(0)
    kind, config_kind = FAMILIES[family].models[head_of(family)].__name__, type(config).__name__
    if name == "fasttfm":
        with torch.device(device):
            return getattr(models, kind)(config)
    import transformers

    fields = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    fasttfm.register_attention()
    theirs = getattr(transformers, config_kind)(**fields)
    with torch.device(device):
        try:
            theirs._attn_implementation = "fasttfm_flash" if name == "hf-flash" else "sdpa"
            model = getattr(transformers, kind)(theirs).to(device)
        except ValueError:  # the family has no SDPA
            theirs._attn_implementation = "eager"
            model = getattr(transformers, kind)(theirs).to(device)
    if name == "hf-patched":
        fasttfm.patch(model)
    return model


def title_of(name: str, model: Any) -> str:
    """A contender's name in rows."""
    if name == "fasttfm":
        return name
    attention = {"hf-flash": "fasttfm_flash", "hf-patched": "fasttfm.patch"}.get(
        name, model.config._attn_implementation
    )
    return f"transformers, {attention}" + (", compile" if name == "hf-compile" else "")


def call_of(name: str, model: Any, batch: Batch, head: Head, *, trained: bool) -> Callable[[], Tensor]:
    """Computes a contender's loss, or its last hidden states in inference."""
    if name == "fasttfm":
        layout = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.longest}
        if trained:
            own = batch.labels(head, packed=True)
            return lambda: model(batch.packed, **layout, **own).loss
        encoder = getattr(model, model.names.prefix, model)
        return lambda: encoder(batch.packed, **layout).last_hidden_state
    body = model if trained else model.base_model
    body = torch.compile(body) if name == "hf-compile" else body
    labels = batch.labels(head, packed=False)
    if name == "hf-flash":
        bounds = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
        longest = {"max_length_q": batch.longest, "max_length_k": batch.longest}
        inputs = {"input_ids": batch.packed[None], "position_ids": batch.token_positions[None], **bounds, **longest}
        labels = {"labels": labels["labels"][batch.mask.bool()][None]}
    else:
        inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
    if trained:
        return lambda: body(**inputs, **labels).loss
    return lambda: body(**inputs).last_hidden_state


def in_inference(call: Callable[[], Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def print_profile(name: str, call: Callable[[], object]) -> None:
    """Prints the kernels of one call, sorted by their time on the GPU."""
    for _ in range(3):
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    print(name)
    print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70))


def contenders_of(parsed: argparse.Namespace, family: str, kind: str, config: Any, batch: Batch) -> dict[str, Any]:
    """A call for each contender, by its name in rows."""
    calls, device = {}, torch.device(parsed.device)
    trained = kind == "step"
    for name in parsed.contenders:
        model = model_of(name, family, config, device)
        title = title_of(name, model)
        if trained:
            optimizer: Any = optim.AdamW if name == "fasttfm" else functools.partial(torch.optim.AdamW, fused=True)
            call = call_of(name, model.train(), batch, head_of(family), trained=True)
            calls[title] = training_step(call, optimizer(model.parameters(), lr=1e-5), device)
        else:
            model = model.eval().to(torch.bfloat16 if device.type == "cuda" else torch.float32)
            calls[title] = in_inference(call_of(name, model, batch, head_of(family), trained=False))
    return calls


def measured(parsed: argparse.Namespace, family: str, kind: str) -> None:
    """Prints the times of a family's step or inference, and appends their rows."""
    device = torch.device(parsed.device)
    size = parsed.size or SIZES[family]
    config_kind = FAMILIES[family].config
    fields: dict[str, Any] = {}
    if parsed.layers is not None:
        fields[next(name for name in LAYERS if name in config_kind.__dataclass_fields__)] = parsed.layers
    if parsed.vocabulary is not None:
        fields |= {"vocab_size": parsed.vocabulary, "pad_token_id": 0}
    config = config_kind.named(size, **fields)
    batch = Batch(parsed.batch, parsed.sequence, config.vocab_size, device, padded=not parsed.full)
    changes = "".join(
        f", {value} {what}" for value, what in ((parsed.layers, "layers"), (parsed.vocabulary, "tokens")) if value
    )
    case = f"{family}-{size}{changes} {kind} {parsed.batch}x{parsed.sequence}" + ("" if parsed.full else " packed")
    print(f"{case}: {len(batch.packed)} tokens", flush=True)
    calls = contenders_of(parsed, family, kind, config, batch)
    if parsed.profile:
        for name, run in calls.items():
            print_profile(name, run)
        return
    times = timed_in_turns(calls, device, rounds=parsed.rounds, warmup=parsed.warmup)
    print_times(times)
    if parsed.append is not None:
        append(Path(parsed.append) / f"{file_stem(device)}-encoders.csv", case, times, device)


def append(path: Path, case: str, times: Mapping[str, Timed], device: torch.device) -> None:
    """Writes the rows of a case at the end of a file."""
    import transformers

    versions = (torch.__version__, transformers.__version__)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for name, each in times.items():
            memory = f"{each.memory:.1f}" if each.memory else ""
            writer.writerow([device_name(device), case, name, f"{each.milliseconds:.2f}", memory, *versions])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["modernbert"], choices=["all", *SIZES])
    parser.add_argument("--size", help="a named size of the family")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--vocabulary", type=int, help="fewer tokens than the size has")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3, help="calls before the rounds")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--calls", nargs="+", default=["step"], choices=["step", "inference"])
    parser.add_argument("--full", action="store_true", help="sequences of the same length")
    parser.add_argument("--append", help="a folder, to whose file of this device rows are appended")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no family is begun")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one call (GPU)")
    parsed = parser.parse_args()
    families = list(SIZES) if "all" in parsed.family else parsed.family
    device, start = torch.device(parsed.device), time.monotonic()
    print(f"{device_name(device)}, torch {torch.__version__}", flush=True)
    for index, family in enumerate(families):
        if time.monotonic() - start > parsed.limit:
            print(f"not measured within {parsed.limit:g} s: {', '.join(families[index:])}")
            break
        for kind in parsed.calls:
            try:
                measured(parsed, family, kind)
            except Exception as error:  # the other families' rows are still measured
                if len(families) == 1:
                    raise
                print(f"{family} {kind}: failed: {type(error).__name__}: {error}", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
