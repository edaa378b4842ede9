"""``Progress`` and ``tracked``: a progress bar on a terminal, occasional lines elsewhere; a device's peak FLOP/s."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, TypeVar

import torch

from fasttfm import _extras

# Dense bf16 FLOP/s from data sheets; the first name that matches is used.
_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
}
_SECONDS = 10.0  # between lines, without a terminal
Item = TypeVar("Item")


def peak_flops(device: torch.device) -> float | None:
    """The device's peak bf16 FLOP/s; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for key, value in _PEAKS.items() if key in name), None)


class Progress:
    """Shows the progress of a run: step, loss, tokens per second, fraction of the peak, time left.

    Args:
        steps: The number of steps of the run.
        start: The number of completed steps.
        peak: The peak FLOP/s of all devices, if known.
    """

    def __init__(self, steps: int, *, start: int = 0, peak: float | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._steps, self._done, self._first = steps, start, start
        self._peak = peak
        self._begun = self._said = time.perf_counter()
        self._bar = self._terminal_bar() if self._stream.isatty() else None

    def _terminal_bar(self) -> Any:
        tqdm = _tqdm()
        layout = "{n_fmt}/{total_fmt} |{bar}| {postfix} [{elapsed}, {remaining} left]"
        return tqdm(total=self._steps, initial=self._done, file=self._stream, bar_format=layout, dynamic_ncols=True)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._done)
        self._done = step

    def say(self, loss: float, tokens_per_second: float, flops_per_second: float) -> None:
        """Shows the latest numbers."""
        parts = [f"loss {loss:.3f}", f"{tokens_per_second:,.0f} tokens/s"]
        if self._peak and flops_per_second:
            parts.append(f"{flops_per_second / self._peak:.0%} of peak")
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
            return
        now = time.perf_counter()
        if now - self._said >= _SECONDS or self._done == self._steps:
            self._said = now
            left = (now - self._begun) / max(1, self._done - self._first) * (self._steps - self._done)
            print(
                f"step {self._done}/{self._steps}: {', '.join(parts)}, {left:.0f} s left", file=self._stream, flush=True
            )

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def tracked(
    items: Iterable[Item], unit: str, *, total: int | None = None, stream: TextIO | None = None
) -> Iterator[Item]:
    """Yields the items, with a progress bar on a terminal, and elsewhere a line every ten seconds.

    Args:
        unit: The name of the items, in the plural.
        total: The number of items, if known; the time left is only shown with it.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        yield from _tqdm()(items, total=total, unit=f" {unit}", file=stream, dynamic_ncols=True)
        return
    begun = said = time.perf_counter()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.perf_counter()
        if now - said >= _SECONDS:
            said = now
            left = "" if total is None else f" of {total:,}, {(now - begun) / done * (total - done):.0f} s left"
            print(f"{done:,} {unit}{left}", file=stream, flush=True)


def _tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        raise _extras.missing("the progress bar", "tqdm", "train") from None
    return tqdm
