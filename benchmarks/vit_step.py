"""Times a training step of ViT and its inference, against transformers.

    python benchmarks/vit_step.py                                 ViT-B/16, 256 images of 224 pixels, on a GPU
    python benchmarks/vit_step.py --size mini --batch 8 --device cpu --rounds 3

The step is forward, backward and AdamW in bf16 autocast with fp32 weights. transformers runs with SDPA, eager and
compiled. The contenders take turns; times are medians.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm import models, optim
from fasttfm.bench.steps import print_times, timed_in_turns, training_step
from fasttfm.bench.timing import device_name

CONTENDERS = ("fasttfm", "fasttfm-fast", "hf", "hf-compile")


def model_of(name: str, size: str, device: torch.device) -> tuple[Any, Callable[..., Any]]:
    """A contender's model, and the callable that runs it, which may be compiled."""
    torch.manual_seed(0)
    config = models.ViTConfig.named(size, num_labels=1000, keep_activation=name.endswith("fast"))
    if name.startswith("fasttfm"):
        model: Any = models.ViTForImageClassification(config).to(device)
        return model, model
    import transformers

    left_out = ("model_type", "recompute", "keep_activation")
    fields = {key: value for key, value in config.to_dict().items() if key not in left_out}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**fields)).to(device)
    return model, torch.compile(model) if name.endswith("compile") else model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", choices=tuple(models.ViTConfig.sizes))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--inference", action="store_true", help="time the forward instead of a training step")
    parsed = parser.parse_args()
    device = torch.device(parsed.device)
    image = models.ViTConfig.named(parsed.size).image()
    pixels = torch.randn(parsed.batch, 3, *image, device=device)
    labels = torch.randint(0, 1000, (parsed.batch,), device=device)
    print(f"{device_name(device)}, torch {torch.__version__}: ViT-{parsed.size}, {parsed.batch} x {image}")
    calls: dict[str, Callable[[], object]] = {}
    for name in parsed.contenders:
        model, call = model_of(name, parsed.size, device)
        if parsed.inference:
            calls[name] = inference(model.eval(), call, pixels)
        else:
            optimizer: Any = optim.AdamW if "fasttfm" in name else functools.partial(torch.optim.AdamW, fused=True)
            model.train()
            calls[name] = training_step(loss_of(call, pixels, labels), optimizer(model.parameters(), lr=1e-5), device)
    print_times(timed_in_turns(calls, device, rounds=parsed.rounds))
    return 0


def loss_of(call: Callable[..., Any], pixels: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        value: Tensor = call(pixels, labels=labels).loss
        return value

    return loss


def inference(model: Any, call: Callable[..., Any], pixels: Tensor) -> Callable[[], object]:
    model.to(torch.bfloat16)
    pixels = pixels.to(torch.bfloat16)

    def run() -> object:
        with torch.inference_mode():
            return call(pixels).logits

    return run


if __name__ == "__main__":
    raise SystemExit(main())
