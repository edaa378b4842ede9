"""The contenders of benchmarks/small_batches.py: their models and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fasttfm
from fasttfm import models, ops
from fasttfm.ops import cu_seqlens_from_lengths

TRAINING = (
    "fasttfm packed",
    "fasttfm lengths",
    "fasttfm mask",
    "hf patched",
    "hf patched, fasttfm.optim",
    "hf eager",
    "hf compile",
    "hf reduce-overhead",
)
INFERENCE = ("fasttfm", "fasttfm autocast", "hf patched", "hf eager", "hf reduce-overhead")
LABELS = 2


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [B, S]
    mask: Tensor  # int64 [B, S], as tokenizers give it
    lengths: list[int]
    labels: Tensor  # [B]

    @staticmethod
    def of(size: int, sequence: int, vocabulary: int, device: torch.device, *, padded: bool = True) -> Batch:
        """The same ids and lengths in each run. If padded, lengths are spread evenly from S/8 to S: 56% are tokens."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(5, vocabulary, (size, sequence), generator=generator)
        labels = torch.randint(LABELS, (size,), generator=generator)
        first = max(1, sequence // 8) if padded and size > 1 else sequence
        lengths = torch.linspace(first, sequence, size).round().int().tolist()
        mask = (torch.arange(sequence) < torch.tensor(lengths)[:, None]).long()
        return Batch(ids.to(device), mask.to(device), lengths, labels.to(device))

    def arguments(self, layout: str) -> dict[str, Any]:
        """A model's arguments for a layout: "packed", "lengths" or "mask"."""
        if layout == "mask":
            return {"input_ids": self.ids, "attention_mask": self.mask}
        if layout == "lengths":
            return {"input_ids": self.ids, "lengths": self.lengths}
        boundaries = cu_seqlens_from_lengths(self.lengths, device=self.ids.device)
        ids = self.ids[self.mask.bool()]
        return {"input_ids": ids, "cu_seqlens": boundaries, "max_seqlen": self.ids.shape[1]}


@dataclass(frozen=True)
class Model:
    """A BERT of a size, "base" or "mini", on a device."""

    size: str
    device: torch.device
    vocabulary: int = 30522

    def ours(self, kind: str) -> Any:
        config = models.BertConfig.named(self.size, vocab_size=self.vocabulary, num_labels=LABELS)
        torch.manual_seed(0)
        with self.device:
            return getattr(models, kind)(config)

    def theirs(self, kind: str) -> Any:
        import transformers

        sizes = models.BertConfig.sizes[self.size]
        config = transformers.BertConfig(vocab_size=self.vocabulary, num_labels=LABELS, **sizes)
        torch.manual_seed(0)
        with self.device:
            return getattr(transformers, kind)(config)

    def autocast(self, enabled: bool = True) -> Any:
        """bf16 on a GPU; disabled on a CPU, where training is in fp32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled and self.device.type == "cuda")


# ---- training --------------------------------------------------------------------------------------------------------


def training_step(name: str, model: Model, batch: Batch) -> Callable[[], Tensor]:
    """One step of fine-tuning a classifier: forward, backward and fused AdamW."""
    kind = "BertForSequenceClassification"
    module: nn.Module = (model.ours(kind) if name.startswith("fasttfm") else model.theirs(kind)).train()
    layout = name.split()[1] if name.startswith("fasttfm") else "mask"
    if name.startswith("hf patched"):
        fasttfm.patch(module)
    optimizer: torch.optim.Optimizer
    if "fasttfm" in name:
        optimizer = our_optimizer(module, model.device)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=2e-5, fused=True)
    return step_of(_compiled(name, module), optimizer, batch.arguments(layout) | {"labels": batch.labels}, model)


def our_optimizer(module: nn.Module, device: torch.device, max_norm: float | None = None) -> fasttfm.optim.AdamW:
    """As ``fasttfm finetune`` makes it."""
    on_gpu = device.type == "cuda"
    return fasttfm.optim.AdamW(
        module.parameters(), lr=2e-5, max_norm=max_norm, weight_copies=on_gpu, direct_gradients=on_gpu
    )


def step_of(
    call: Any, optimizer: torch.optim.Optimizer, arguments: dict[str, Any], model: Model
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with model.autocast():
            loss: Tensor = call(**arguments).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _compiled(name: str, module: nn.Module) -> Any:
    if name.endswith("reduce-overhead"):
        return torch.compile(module, mode="reduce-overhead")
    return torch.compile(module) if name.endswith("compile") else module


# ---- inference -------------------------------------------------------------------------------------------------------


def encoder(name: str, model: Model) -> Any:
    """A contender's encoder for ``inference_call``: weights in bf16 on a GPU, or in fp32 under autocast."""
    module = (model.ours("BertModel") if name.startswith("fasttfm") else model.theirs("BertModel")).eval()
    if model.device.type == "cuda" and not name.endswith("autocast"):
        module = module.bfloat16()
    if name == "hf patched":
        fasttfm.patch(module)
    return _compiled(name, module)


def inference_call(name: str, call: Any, model: Model, batch: Batch) -> Callable[[], Tensor]:
    arguments = batch.arguments("lengths" if name.startswith("fasttfm") else "mask")

    @torch.no_grad()
    def run() -> Tensor:
        with model.autocast(name.endswith("autocast")):
            states: Tensor = call(**arguments).last_hidden_state
        return states

    return run


# ---- single calls ----------------------------------------------------------------------------------------------------


def op_pairs(device: torch.device, *, with_gradient: bool) -> dict[str, dict[str, Callable[[], object]]]:
    """An op's call with 128 rows, and that of torch's op or chain of ops."""
    columns, heads, dtype = (768, 12, torch.bfloat16) if device.type == "cuda" else (256, 4, torch.float32)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(with_gradient)

    x, residual, qkv = new(128, columns), new(128, columns), new(1, 128, 3, heads, columns // heads)
    weight, bias = new(columns), new(columns)
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv.unbind(2))
    norm = ((columns,), weight, bias)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "layer_norm": (lambda: ops.layer_norm(x, weight, bias), lambda: functional.layer_norm(x, *norm)),
        "attention": (lambda: ops.attention(qkv), lambda: functional.scaled_dot_product_attention(q, k, v)),
        "dropout_add_layer_norm": (
            lambda: ops.dropout_add_layer_norm(x, residual, weight, bias, p=0.1),
            lambda: functional.layer_norm(residual + functional.dropout(x, 0.1), *norm),
        ),
        "bias_gelu": (lambda: ops.bias_gelu(x, bias), lambda: functional.gelu(x + bias)),
    }
    return {op: {"fasttfm": ours, "torch": theirs} for op, (ours, theirs) in pairs.items()}
