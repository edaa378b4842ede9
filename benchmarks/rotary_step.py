"""Times a training step and inference of models with rotary positions, against transformers.

    python benchmarks/rotary_step.py                                ModernBERT-base, 64 x 1024 packed, on a GPU
    python benchmarks/rotary_step.py --inference --batch 1 --sequence 8192
    python benchmarks/rotary_step.py --inference --spread --batch 16 --sequence 1024
    python benchmarks/rotary_step.py --inference --family qwen3 --size 0.6b --batch 1 --sequence 512
    python benchmarks/rotary_step.py --layers 4 --batch 2 --sequence 64 --device cpu --rounds 3

The step is forward, backward and AdamW in bf16 autocast with fp32 weights and without dropout; inference is in bf16,
over full sequences without ``--spread``. Lengths are spread evenly from S/8 to S (56% real tokens), 15% of the tokens
are predicted. ``hf`` and ``hf-compile`` are transformers with SDPA over padded batches; ``hf-flash`` gets the same
packed tokens as ours, through ``attn_implementation="fasttfm_flash"``; ``hf-patched`` is transformers' model after
``fasttfm.patch``. The contenders take turns; times are medians. ``--profile`` prints the kernels of one call instead.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fasttfm
from fasttfm import models, ops, optim
from fasttfm.bench.steps import print_times, timed_in_turns, training_step
from fasttfm.bench.timing import device_name
from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Head
from fasttfm.models.rotary import RotaryPositions

CONTENDERS = ("fasttfm", "hf", "hf-compile", "hf-flash", "hf-patched")
PREDICTED = 0.15
ROTARY = [name for name, family in FAMILIES.items() if issubclass(family.models[Head.NONE], RotaryPositions)]


class Batch:
    """The same tokens, padded and packed."""

    def __init__(self, batch: int, sequence: int, vocabulary: int, device: torch.device, *, padded: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, vocabulary, (batch, sequence), generator=generator)
        lengths = torch.linspace(sequence // 8 if padded else sequence, sequence, batch).round().int()
        mask = torch.arange(sequence) < lengths[:, None]
        chosen = (torch.rand(batch, sequence, generator=generator) < PREDICTED) & mask
        self.ids, self.mask = ids.to(device), mask.long().to(device)
        self.labels = torch.where(chosen, ids, -100).to(device)
        self.packed = ids[mask].to(device)
        self.positions = chosen[mask].nonzero().squeeze(1).to(device)
        self.predicted = ids[chosen].to(device)
        self.packed_labels = torch.where(chosen, ids, -100)[mask].to(device)
        self.cu_seqlens = ops.cu_seqlens_from_lengths(lengths.tolist(), device=device)
        self.longest = int(lengths.max())
        self.token_positions = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)


def kind_of(family: str) -> Any:
    """The family's masked LM, or its model without a head."""
    models = FAMILIES[family].models
    return models.get(Head.MASKED_LM, models[Head.NONE])


def model_of(name: str, family: str, config: Any, device: torch.device) -> Any:
    torch.manual_seed(0)
    kind, config_kind = kind_of(family).__name__, type(config).__name__
    if name == "fasttfm":
        return getattr(models, kind)(config).to(device)
    import transformers

    fields = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    fasttfm.register_attention()
    implementation = "fasttfm_flash" if name == "hf-flash" else "sdpa"
    theirs = getattr(transformers, config_kind)(**fields, attn_implementation=implementation)
    model = getattr(transformers, kind)(theirs).to(device)
    if name == "hf-patched":
        fasttfm.patch(model)
    return model


def call_of(name: str, model: Any, batch: Batch, *, trained: bool) -> Callable[[], Tensor]:
    """Computes a contender's loss, or its last hidden states in inference."""
    if name == "fasttfm":
        layout = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.longest}
        labels = {"labels": batch.predicted, "positions": batch.positions}
        if trained:
            return lambda: model(batch.packed, **layout, **labels).loss
        encoder = getattr(model, model.names.prefix, model)
        return lambda: encoder(batch.packed, **layout).last_hidden_state
    body = model if trained else model.base_model
    body = torch.compile(body) if name == "hf-compile" else body
    if name == "hf-flash":
        bounds = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
        longest = {"max_length_q": batch.longest, "max_length_k": batch.longest}
        inputs = {"input_ids": batch.packed[None], "position_ids": batch.token_positions[None], **bounds, **longest}
        labels = {"labels": batch.packed_labels[None]}
    else:
        inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
        labels = {"labels": batch.labels}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="modernbert", choices=ROTARY)
    parser.add_argument("--size", default="base", help="a named size of the family")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--inference", action="store_true", help="time the encoder's forward over full sequences")
    parser.add_argument("--spread", action="store_true", help="inference over sequences of different lengths")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one call (GPU)")
    parsed = parser.parse_args()
    device = torch.device(parsed.device)
    changes = {} if parsed.layers is None else {"num_hidden_layers": parsed.layers}
    kind = kind_of(parsed.family)
    if Head.MASKED_LM not in FAMILIES[parsed.family].models and not parsed.inference:
        parser.error(f"--family {parsed.family}: expected --inference, because it is not trained on masked tokens")
    config = kind.config_class.named(parsed.size, **changes)
    batch = Batch(
        parsed.batch, parsed.sequence, config.vocab_size, device, padded=parsed.spread or not parsed.inference
    )
    what = f"{parsed.batch} x {parsed.sequence}, {len(batch.packed)} tokens"
    print(f"{device_name(device)}, torch {torch.__version__}: {parsed.family} {parsed.size}, {what}")
    calls: dict[str, Callable[[], object]] = {}
    for name in parsed.contenders:
        model = model_of(name, parsed.family, config, device)
        if parsed.inference:
            call = call_of(name, model.eval().to(torch.bfloat16), batch, trained=False)
            calls[name] = in_inference(call)
        else:
            optimizer: Any = optim.AdamW if name == "fasttfm" else functools.partial(torch.optim.AdamW, fused=True)
            call = call_of(name, model.train(), batch, trained=True)
            calls[name] = training_step(call, optimizer(model.parameters(), lr=1e-5), device)
    if parsed.profile:
        for name, run in calls.items():
            print_profile(name, run)
    else:
        print_times(timed_in_turns(calls, device, rounds=parsed.rounds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
