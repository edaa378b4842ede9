"""Steps and their tensors, which the forward's planners add to."""

from __future__ import annotations

import math
from typing import Any

from fasttfm.kernels.common import philox
from fasttfm.ops.layers import steps
from fasttfm.ops.layers.encoding import BUFFERS
from fasttfm.ops.layers.rules import RULES, Situation
from fasttfm.ops.layers.spec import LayerSpec, Specs

SEEDS = 3  # of a layer
_ALIGNMENT = 4  # bytes per token, which are 256 bytes of 64 tokens
_BY_NAME = {rule.name: rule for rule in RULES}


class StepList:
    """``sizes``: bytes per token of each tensor that the plan places."""

    def __init__(self, specs: Specs, situation: Situation) -> None:
        self.specs, self.situation = specs, situation
        self.steps: list[Any] = []
        self.sizes: dict[str, int] = {}
        self.columns: dict[str, int] = {}  # of tensors in x's dtype
        self.owner: str | None = None  # the rule whose steps read what a session keeps
        self.counters: str | None = None  # of attention's tiles

    def tensor(self, name: str, columns: int) -> str:
        """A tensor of the plan, in x's dtype."""
        self.columns[name] = columns
        return self.sized(name, columns * self.situation.itemsize)

    def stream(self, name: str, columns: int) -> str:
        return self.sized(name, columns * self.situation.stream_itemsize)

    def sized(self, name: str, size: int) -> str:
        self.sizes[name] = -(-size // _ALIGNMENT) * _ALIGNMENT
        return name

    def parameter(self, index: int, spec: LayerSpec, name: str) -> str | None:
        return f"{index}.{name}" if name in spec.present else None

    def applies(self, name: str, spec: LayerSpec) -> bool:
        if name not in self.situation.rules:
            return False
        return _BY_NAME[name].refusal(spec, self.situation) is None

    def attend(self, index: int, spec: LayerSpec, qkv: str) -> str:
        """Attention's result."""
        attention = spec.attention
        out = self.tensor(f"{index}.out", attention.heads * attention.head_dim)
        scale = 1 / math.sqrt(attention.head_dim) if attention.scale is None else attention.scale
        sizes = (BUFFERS.index("capacity"), index, attention.heads, attention.kv_heads, attention.head_dim)
        if self.situation.cache == "tokens":
            window = (attention.window_left, scale, out)
            self.steps.append(steps.CachedAttention(qkv, "keys", "values", "lengths", *sizes, *window))
            return out
        if self.situation.cache == "prompts":
            self.steps.append(steps.StoreKeys(qkv, "keys", "values", "places", *sizes))
        lse = self.sized(f"{index}.lse", 4 * attention.heads)
        threshold = philox.threshold(attention.dropout)
        seed = "seeds" if threshold else None
        short = any(self.applies(name, spec) for name in ("short_attention", "few_rows"))
        self.steps.append(
            steps.Attention(
                *(qkv, seed, SEEDS * index, attention.heads, attention.kv_heads, attention.head_dim),
                *(attention.window_left, attention.window_right, scale, threshold, philox.scale(threshold)),
                *(out, lse, self.counters, index, short),
            )
        )
        return out
