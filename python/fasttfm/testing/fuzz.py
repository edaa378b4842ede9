"""Random calls of an op against the reference in fp64: ``python -m fasttfm.testing.fuzz --op NAME --calls N --seed S``.

A call is drawn by its number: the op's sizes and options (``OpSpec.random_case``), a type, a backend, how inputs and
incoming gradients lie in memory, which inputs require gradients and which outputs have them; ``--call K`` repeats one.
Every result must be within the tolerance of tolerance.py. For small tensors that depends on luck: plain torch may round
a number well by chance. A call that fails is therefore repeated with other numbers, and the root mean squares of the
errors are compared: the chance that of two equally good implementations one is twice as good in 64 draws is below 1e-6.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs
from fasttfm.ops.core.backends import BackendRefused
from fasttfm.testing.call import Call, backends_on, floating_inputs
from fasttfm.testing.harness import comparisons_of
from fasttfm.testing.memory_layouts import INCOMING_LAYOUTS, INPUT_LAYOUTS
from fasttfm.testing.non_finite import Element, check_elements, values_for
from fasttfm.testing.spec import OpSpec
from fasttfm.testing.specs import every_spec
from fasttfm.testing.tolerance import Comparison, root_mean_square, summary

DRAWS = 64
# Without the layouts "expanded" and "one_row": the first makes many gradients 0, the second makes sums of equal
# numbers, which plain torch computes exactly (pairwise sums over a power of two of rows) and other orders round.
# properties.py checks both layouts.
_LAYOUTS = [layout for layout in INCOMING_LAYOUTS if layout not in ("expanded", "one_row")]
_INTERPRETED_FRACTION = 0.02  # of the calls: an interpreted call takes as long as hundreds of others


@dataclass(frozen=True)
class RandomCall:
    """The call with index ``number`` of a seed; everything follows from op, seed, number and device."""

    call: Call
    number: int
    seed: int
    inputs: Mapping[str, str] = field(default_factory=dict)  # input -> layout
    incoming: str = "contiguous"  # layout of the incoming gradients
    absent: int | None = None  # the output without a gradient
    differentiated: tuple[str, ...] | None = None  # inputs that require gradients; None: all
    non_finite: bool = False  # whether a NaN or an infinity is put somewhere

    def check(self) -> None:
        """Raises AssertionError if a result is not as accurate as plain torch's."""
        if all(comparison.ok for comparison in self._compared(self.seed)):
            return
        with_terms = self.call.spec.terms is not None
        draws = [self._compared(self.seed + draw, with_terms) for draw in range(DRAWS)]
        tensors = [summary(comparisons, root_mean_square) for comparisons in zip(*draws, strict=True)]
        wrong = [str(tensor) for tensor in tensors if not tensor.ok]
        assert not wrong, "; ".join(wrong)

    def _compared(self, seed: int, with_terms: bool = False) -> list[Comparison]:
        inputs = self.drawn(seed)
        if self.non_finite:
            self._check_non_finite(inputs, self.call.incoming(inputs))
            return []
        how: dict[str, Any] = {"incoming": self._drawn_incoming(inputs, seed), "differentiated": self.differentiated}
        tested, naive, exact = (run(inputs, **how) for run in (self.call.tested, self.call.naive, self.call.exact))
        return comparisons_of(tested, naive, exact, self.call.terms(inputs, **how) if with_terms else None)

    def drawn(self, seed: int) -> Inputs:
        inputs = self.call.inputs(seed)
        for name, layout in self.inputs.items():
            inputs[name] = INPUT_LAYOUTS[layout](inputs[name])
        return inputs

    def _drawn_incoming(self, inputs: Inputs, seed: int) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [INCOMING_LAYOUTS[self.incoming](x) for x in self.call.incoming(inputs, seed)]
        if self.absent is not None and self.absent < len(gradients) > 1:
            gradients[self.absent] = None
        return gradients

    def _check_non_finite(self, inputs: Inputs, incoming: list[Tensor]) -> None:
        source = random.Random(self.number)
        owners = [name for name in floating_inputs(inputs) if inputs[name].numel() > 0]
        if owners and incoming:  # otherwise the outputs are integers
            owner = source.choice(owners)
            element = Element(owner, source.randrange(inputs[owner].numel()))
            value = source.choice(values_for(self.call, element))
            check_elements(self.call, inputs, incoming, [(element, [value])])

    def __str__(self) -> str:
        call = self.call
        layouts = ", ".join(f"{name} {layout}" for name, layout in self.inputs.items())
        parts = {
            "backend": call.backend,
            "dtype": str(call.dtype).removeprefix("torch."),
            "sizes": dict(call.case.sizes),
            "options": dict(call.case.options),
            "inputs": layouts or "as they are",
            "incoming": self.incoming,
            "absent": self.absent,
            "differentiated": self.differentiated,
            "non_finite": self.non_finite,
        }
        command = f"--op {call.spec.name} --seed {self.seed} --call {self.number} --device {call.device}"
        return f"python -m fasttfm.testing.fuzz {command}  # " + ", ".join(f"{k}={v}" for k, v in parts.items())


def draw_call(spec: OpSpec, seed: int, number: int, device: str = "cpu", interpreter: bool = True) -> RandomCall:
    """Call ``number``, which does not depend on earlier draws. ``interpreter`` runs some calls in Triton's
    interpreter."""
    assert spec.random_case is not None, f"{spec.name} declares no random_case"
    source = random.Random(f"{spec.name} {seed} {number}")
    backends = backends_on(spec, device)
    interpreted = device == "cpu" and "triton" in backends
    if interpreted:
        backends.remove("triton")
    case = spec.random_case(source)
    backend = source.choice(backends)
    chosen = source.random() < _INTERPRETED_FRACTION
    if chosen and interpreted and interpreter and case.interpret:
        backend = "triton"
    dtype = torch.float32 if backend == "triton" and interpreted else source.choice(case.dtypes)
    call = Call(spec, case, dtype, backend, device)
    shapes = call.inputs()
    layouts = {name: source.choice(list(INPUT_LAYOUTS)) for name in floating_inputs(shapes) if source.random() < 0.3}
    names = [name for name in spec.differentiable if shapes.get(name) is not None]
    return RandomCall(
        call,
        number,
        seed,
        layouts,
        incoming=source.choice(_LAYOUTS),
        absent=source.choice((None, None, None, 0, 1)),
        differentiated=None if source.random() < 0.6 else tuple(name for name in names if source.random() < 0.6),
        non_finite=source.random() < 0.05,
    )


@dataclass
class Result:
    """The numbers of calls that were right, refused by their backend with a reason, and wrong."""

    right: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.right, self.refused = self.right + other.right, self.refused + other.refused
        self.failures += other.failures

    def __str__(self) -> str:
        return f"{self.right} right, {self.refused} refused, {len(self.failures)} failed"


def run_calls(
    spec: OpSpec,
    numbers: range,
    seed: int,
    device: str = "cpu",
    interpreter: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> Result:
    result = Result()
    for number in numbers:
        call = draw_call(spec, seed, number, device, interpreter)
        try:
            call.check()
            result.right += 1
        except BackendRefused:
            result.refused += 1
        except Exception as error:  # of any type: the call has failed
            result.failures.append(f"{call}\n    {type(error).__name__}: {error}")
            report(result.failures[-1])
    return result


def _devices(chosen: str | None) -> list[str]:
    return [chosen] if chosen else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _chunks(numbers: range, size: int) -> Iterator[range]:
    for start in range(numbers.start, numbers.stop, size):
        yield range(start, min(start + size, numbers.stop))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random calls of ops against the reference in fp64.")
    parser.add_argument("--op", action="append", help="an op's name; may be given several times; default: every op")
    parser.add_argument("--calls", type=int, default=10_000, help="calls for each op and device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--call", type=int, help="this call only")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the CPU, and the GPU where there is one")
    options = parser.parse_args(arguments)
    specs = {spec.name: spec for spec in every_spec() if spec.random_case is not None}
    unknown = sorted(set(options.op or ()) - specs.keys())
    if unknown:
        parser.error(f"--op: expected one of {', '.join(specs)}, got {unknown[0]}")
    failed = 0
    for name in options.op or specs:
        for device in _devices(options.device):
            numbers = range(options.calls) if options.call is None else range(options.call, options.call + 1)
            failed += _fuzz(specs[name], numbers, options.seed, device)
    return int(failed > 0)


def _fuzz(spec: OpSpec, numbers: range, seed: int, device: str) -> int:
    """Runs the calls with a line of progress; returns how many failed."""
    total, start = Result(), time.monotonic()
    for chunk in _chunks(numbers, 100):
        total.add(run_calls(spec, chunk, seed, device, report=lambda failure: print(f"\n{failure}", flush=True)))
        elapsed = time.monotonic() - start
        line = f"\r{spec.name} {device}: {chunk.stop - numbers.start} of {len(numbers)} calls, {elapsed:.0f} s"
        print(line, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{spec.name} {device}: {total}", flush=True)
    return len(total.failures)


if __name__ == "__main__":
    raise SystemExit(main())
