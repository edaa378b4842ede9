"""``Rotation``: the angles of rotary positions, scaled for longer texts than those of pre-training.

    the angle of pair i at position p is p * rate_i,   rate_i = theta ** (-2 i / D),   wavelength_i = 2 pi / rate_i

    linear    rate_i / factor
    dynamic   theta * (factor S / P - (factor - 1)) ** (D / (D - 2)) instead of theta, for texts of up to S > P tokens
    llama3    rate_i for wavelengths below P / high, rate_i / factor for those above P / low, between them a mean of
              both
    yarn      a mean of rate_i and rate_i / factor by i, between the pairs that turn ``beta_fast`` and ``beta_slow``
              times in P positions; cosines and sines are multiplied by ``attention_factor``

P is the number of positions of pre-training. The formulas are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rotation:
    """A scaled rotation. Fields have transformers' names in ``rope_parameters``."""

    theta: float
    kind: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def rates(self, plain: Tensor, columns: int) -> Tensor:
        """The rates of the pairs, of those without scaling, ``plain`` [D / 2]."""
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain, columns)
        return plain / self.factor if self.kind == "linear" else plain

    def _llama3(self, plain: Tensor) -> Tensor:
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)  # in P positions
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - share) * plain / self.factor + share * plain
        return torch.where(share < 0, plain / self.factor, torch.where(share > 1, plain, between))

    def _yarn(self, plain: Tensor, columns: int) -> Tensor:
        low, high = (self._pair_with(turns, columns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, columns - 1)
        width = 0.001 if low == high else high - low
        share = ((torch.arange(columns // 2, device=plain.device, dtype=plain.dtype) - low) / width).clamp(0, 1)
        return plain / self.factor * share + plain * (1 - share)

    def _pair_with(self, turns: float, columns: int) -> float:
        """The pair that turns so often in P positions."""
        logarithm = math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
        return columns * logarithm / (2 * math.log(self.theta))


Theta = float | Rotation  # a number is the base of the wavelengths


def at_length(theta: Theta, columns: int, longest: int | Tensor) -> Theta | Tensor:
    """The rotation of a batch whose longest text has ``longest`` tokens; the base of wavelengths as a tensor if that is
    one, so that a GPU need not wait for it."""
    if not isinstance(theta, Rotation) or theta.kind != "dynamic":
        return theta
    growth = theta.factor * longest / theta.original_max_position_embeddings - (theta.factor - 1)
    growth = growth.clamp(min=1) if isinstance(growth, Tensor) else max(1.0, growth)
    base: float | Tensor = theta.theta * growth ** (columns / (columns - 2))
    return base


def longest_of(thetas: Iterable[Theta | None], cu_seqlens: Tensor, max_seqlen: int) -> int | Tensor:
    """The number of tokens of the longest text: exact if one of the rotations depends on it, otherwise the bound."""
    return cu_seqlens.diff().max() if any(is_scaled_by_length(theta, max_seqlen) for theta in thetas) else max_seqlen


def is_scaled_by_length(theta: Theta | None, longest: int) -> bool:
    """Whether the rotation of a text of this length depends on its length."""
    return isinstance(theta, Rotation) and theta.kind == "dynamic" and longest > theta.original_max_position_embeddings


def rates(theta: Theta | Tensor, columns: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The rates of the pairs [D / 2], and the factor of cosines and sines."""
    base = theta.theta if isinstance(theta, Rotation) else theta
    plain = 1.0 / base ** (torch.arange(0, columns, 2, device=device, dtype=dtype) / columns)
    return (theta.rates(plain, columns), theta.attention_factor) if isinstance(theta, Rotation) else (plain, 1.0)


# ---- configurations --------------------------------------------------------------------------------------------------


def stated_rotation(name: str, rope: Mapping[str, Any], theta: float, positions: int) -> Theta:
    """The rotation that the field ``name`` of a configuration states. ``theta`` and ``positions``, the longest text's,
    are those of the configuration, for what the field does not state."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"{name}: rope_type: expected {', '.join(KINDS)}, got {kind!r}, which is not supported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        got = rope["partial_rotary_factor"]
        raise ValueError(f"{name}: partial_rotary_factor: expected 1 (whole heads are rotated), got {got}")
    theta = float(rope.get("rope_theta", theta))
    if kind == "default":
        return theta
    original = positions if kind == "dynamic" else rope.get("original_max_position_embeddings") or positions
    factor: Any = rope.get("factor")
    if factor is None and kind == "yarn":
        factor = positions / original
    needed = {"factor": factor}
    if kind == "llama3":
        needed |= {key: rope.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    for key, value in needed.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name}: {key}: expected a number above 0, got {value!r}")
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return Rotation(theta, kind, float(factor), int(original), low, high)
    if kind != "yarn":
        return Rotation(theta, kind, float(factor), int(original))
    stated = {key: rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key)}
    return Rotation(
        theta,
        kind,
        float(factor),
        int(original),
        truncate=rope.get("truncate", True),
        attention_factor=_yarn_factor(rope, float(factor)),
        **stated,
    )


def _yarn_factor(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1)
