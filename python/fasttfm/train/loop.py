"""``Trainer``: optimizer steps over batches in parts, with correct means and without synchronization with the GPU."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fasttfm import optim
from fasttfm.nn import Fp8Training
from fasttfm.train.cuda_graph import Graphs
from fasttfm.train.distributed import World, gradients_summed, whole
from fasttfm.train.fp8_all_gather import ShardedFp8Training
from fasttfm.train.schedule import Schedule
from fasttfm.train.settings import StepSettings

_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}  # autocast's
_MAX_PENDING = 8  # metrics in flight before the host synchronizes


@dataclass(frozen=True)
class Objective:
    """A loss: the sum of some terms, each a mean over its own count.

    A step's batch is divided into parts, over ranks and over several batches per rank. So each part computes sums,
    which are divided by the counts of all parts:

        loss = sum over terms of weight * (sum over parts of sums) / (sum over parts of counts)

    The terms of results and logs are the means, without their weights.
    """

    terms: tuple[str, ...]
    counts: Callable[[Any], Sequence[float]]  # of a batch on the host: the divisor of each term's mean
    sums: Callable[[Any, Any], Sequence[Tensor]]  # of module and batch: each term's sum, on the device
    flops: Callable[[Any], float] | None = None  # of a batch on the host: FLOPs of forward and backward
    weights: tuple[float, ...] | None = None  # of the terms; by default 1 for each

    @classmethod
    def of(cls, module: Any) -> Objective:
        """The objective of a module whose forward returns the sums of its losses (``models.objectives.Pretraining``, a
        distillation recipe)."""
        flops = getattr(module, "flops", None)
        return cls(module.terms, module.counts, lambda call, batch: call(batch), flops, tuple(module.weights))

    def loss(self, means: Sequence[float]) -> float:
        """The loss, given the terms' means."""
        return sum(weight * mean for weight, mean in zip(self.term_weights, means, strict=True))

    @property
    def term_weights(self) -> tuple[float, ...]:
        return (1.0,) * len(self.terms) if self.weights is None else self.weights


@dataclass(frozen=True)
class StepResult:
    """The numbers of a step, which are available some steps later."""

    step: int  # counted from 1
    loss: float
    terms: dict[str, float]
    gradient_norm: float
    learning_rate: float
    tokens: int  # of all ranks, if batches have a number of tokens
    flops: float
    skipped: bool  # whether loss or gradient was not finite, so that nothing changed


class NonFiniteError(RuntimeError):
    """Loss or gradient was not finite in several consecutive steps."""


class Trainer:
    """Trains a module.

    Args:
        module: The module, as ``distributed.share_out`` returns it.
        objective: The loss to minimise.
        optimizer: The result of ``optimizers.make_optimizer``, or another one that reads ``grad_scale`` and
            ``found_inf``, such as those of torch with ``fused=True``.
        schedule: The schedule of its learning rates.
        settings: The settings of a step.
        world: The processes; by default only this one, on the module's device.
        seed: If given, random numbers of a batch, such as those of dropout, follow from the seed, the step and the
            batch's number in the step over all ranks: they do not depend on the number of ranks or on earlier steps.
            Batch i of rank r of R is number i R + r. By default, torch's generator continues from batch to batch.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        optimizer: Optimizer,
        schedule: Schedule,
        settings: StepSettings | None = None,
        *,
        world: World | None = None,
        seed: int | None = None,
    ) -> None:
        if not _reads_scale(optimizer):  # gradients would not be clipped, and bad steps not skipped
            expected = "one that reads grad_scale and found_inf (of make_optimizer, or of torch with fused=True)"
            raise ValueError(f"Trainer: optimizer: expected {expected}, got {type(optimizer).__name__}")
        self.module = module.train()  # a loaded model is in evaluation mode, also inside of a new module
        self.objective = objective
        self.optimizer = optimizer
        self.schedule = schedule
        self.settings = settings or StepSettings()
        self.world = world or World(next(module.parameters()).device)
        self.seed = seed
        self.completed = 0  # steps
        self.skipped = 0  # of those that have been read
        self._bad_in_a_row = 0
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._call: Any = torch.compile(module, dynamic=True) if self.settings.compile else module
        # The inputs and outputs of a step keep their memory, so that a CUDA graph can capture it. The host reads all of
        # them by one copy.
        terms, device = len(objective.terms), self.world.device
        self._report = torch.zeros(2 * terms + 3, dtype=torch.float64, device=device)
        self._sums, self._totals, self._norm = self._report.split(
            [terms, terms + 2, 1]
        )  # totals: counts, tokens, flops
        # Totals of a single process stay on the host, unless a CUDA graph reads them.
        self._host_totals: list[float] | None = None
        self._metrics: AsyncMetrics = AsyncMetrics(device)
        self.fp8 = self._fp8_training() if self.settings.precision == "fp8" else None
        self._graphs = Graphs(self._accumulate, self._update) if self.settings.cuda_graph else None

    def _fp8_training(self) -> Fp8Training:
        return (ShardedFp8Training if self.world.parallel == "fsdp" else Fp8Training)(self.module)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[Any]) -> list[StepResult]:
        """Runs a step over ``batches``, which form one batch. Returns the results of earlier steps that have
        arrived."""
        if not self.module.training:  # setting it in every module takes a fraction of a millisecond
            self.module.train()
        rate = self.schedule.set(self.completed)
        self._set_totals(batches)
        self._sums.zero_()
        if self._graphs is not None and isinstance(self.optimizer, optim.AdamW):
            self.optimizer.refresh_copies()  # a replayed graph would not notice changed parameters
        if self._graphs is not None and self.fp8 is not None:
            self.fp8.refresh()
        for index, batch in enumerate(batches):
            if self.seed is not None:
                _seed(self.world.device, self.seed, self.completed, self._number(index))
            with gradients_summed(self.module, last=index + 1 == len(batches)):
                (self._accumulate if self._graphs is None else self._graphs.accumulate)(self._moved(batch))
        self.world.sum(self._sums)
        (self._update if self._graphs is None else self._graphs.update)()
        self.completed += 1
        self._metrics.put((self.completed, rate, self._host_totals), self._report)
        return self._arrived(self._metrics.take())

    def flush(self) -> list[StepResult]:
        """Waits for the results of all steps so far."""
        return self._arrived(self._metrics.take(everything=True))

    def finish(self) -> list[StepResult]:
        """``flush`` after the last step. Raises if all steps were skipped, and warns if some were."""
        results = self.flush()
        if self.skipped and self.skipped == self.completed:
            raise NonFiniteError(
                f"the loss or the gradient was not finite in any of the {self.completed} steps; nothing was changed"
            )
        if self.skipped:
            warnings.warn(
                f"{self.skipped} of {self.completed} steps were skipped: their loss or gradient was not finite",
                stacklevel=2,
            )
        return results

    def _number(self, index: int) -> int:
        """The number of this rank's batch over all ranks."""
        return index * self.world.size + self.world.rank

    def _set_totals(self, batches: Sequence[Any]) -> None:
        flops = self.objective.flops or (lambda _: 0.0)
        rows = [[*self.objective.counts(batch), getattr(batch, "tokens", 0), flops(batch)] for batch in batches]
        if self.world.size == 1 and self._graphs is None:
            self._host_totals = [float(sum(column)) for column in zip(*rows, strict=True)]
            return
        totals = torch.tensor(rows, dtype=torch.float64, device="cpu").sum(0)
        if self.world.device.type == "cuda":
            totals = totals.pin_memory()
        self._totals.copy_(totals, non_blocking=True)
        self.world.sum(self._totals)

    def _moved(self, batch: Any) -> Any:
        if self.world.device.type == "cuda" and hasattr(batch, "pin_memory"):
            batch = batch.pin_memory()
        return batch.to(self.world.device, non_blocking=True)

    def _accumulate(self, batch: Any) -> None:
        """Adds the gradients of a part. DDP and FSDP average the ranks' gradients, so the loss is scaled to give their
        sum."""
        terms = self._terms(batch)
        pairs = list(zip(terms, self._shares(terms), strict=True))
        differentiable = [pair for pair in pairs if pair[0].requires_grad]
        roots, gradients = zip(*(differentiable or pairs), strict=True)  # without any, torch says so
        torch.autograd.backward(roots, gradients)
        self._sums.add_(terms[0].detach() if len(terms) == 1 else torch.stack(terms).detach())

    def _shares(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """The loss's gradient with respect to each term's sum, weight / count, in fp32."""
        weights = self.objective.term_weights
        if self._host_totals is None:
            counts = self._totals[: len(terms)].clamp(min=1)
            shares = (self.world.size / counts).unbind()
            return [(share * weight).float() for share, weight in zip(shares, weights, strict=True)]
        pairs = zip(weights, self._host_totals, strict=False)
        shares = [weight / max(count, 1.0) for weight, count in pairs]
        return [torch.full_like(term, share) for term, share in zip(terms, shares, strict=True)]

    def _terms(self, batch: Any) -> list[Tensor]:
        """Each term's sum, in fp32."""
        dtype = _PRECISIONS[self.settings.precision]
        with torch.autocast(self.world.device.type, dtype=dtype, enabled=dtype != torch.float32):
            sums = self.objective.sums(self._call, batch)
        return [term.float() for term in sums]

    @torch.no_grad()
    def _update(self) -> None:
        not_finite = (self._sums.sum() * 0 != 0).float()  # 0 * inf is NaN
        if isinstance(self.optimizer, optim.AdamW):  # with a max_norm its step also computes the norm
            with _lent(self.optimizer, max_norm=self.settings.clip or math.inf, found_inf=not_finite):
                self.optimizer.step()
            norm = self.optimizer.last_norm
        else:
            norm = self._gradient_norm()
            scale = torch.ones_like(norm) if self.settings.clip is None else (norm / self.settings.clip).clamp(min=1)
            found_inf = torch.maximum(not_finite, (norm * 0 != 0).float())
            with _lent(self.optimizer, grad_scale=scale.float(), found_inf=found_inf):
                self.optimizer.step()
        if self.fp8 is not None:
            self.fp8.update(reduce=self.world.size > 1)
        if norm is None:  # no parameter has a gradient
            self._norm.zero_()
        else:
            self._norm.copy_(norm)
        if self._graphs is None:
            for parameter in self._parameters:  # optimizer.zero_grad, without its profiler's range
                parameter.grad = None
        else:  # a graph adds to the same gradients each time
            torch._foreach_zero_(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _gradient_norm(self) -> Tensor:
        if self.world.device.type == "cpu":
            return whole(optim.cpu_norm(self._gradients()))
        return whole(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._gradients(), 2))))

    # ---- results -----------------------------------------------------------------------------------------------------

    def _arrived(self, values: Iterable[tuple[Any, list[float]]]) -> list[StepResult]:
        results = []
        count = len(self.objective.terms)
        for (step, rate, totals), (*sums_and_totals, norm) in values:
            *counts, tokens, flops = sums_and_totals[count:] if totals is None else totals
            means = [total / max(number, 1.0) for total, number in zip(sums_and_totals[:count], counts, strict=True)]
            loss = self.objective.loss(means)
            bad = not math.isfinite(loss + norm)
            terms = dict(zip(self.objective.terms, means, strict=True))
            results.append(StepResult(step, loss, terms, norm, rate, int(tokens), flops, skipped=bad))
            self.skipped += bad
            self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
            if self._bad_in_a_row >= self.settings.bad_steps:
                raise NonFiniteError(
                    f"the loss or the gradient was not finite in {self._bad_in_a_row} steps in a row, the last of them "
                    f"step {step} (loss {loss:g}, gradient norm {norm:g}, learning rate {rate:g}); nothing was changed "
                    "by them. A smaller learning rate or a longer warm-up may help"
                )
        return results

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any], count: int | None = None) -> dict[str, float]:
        """The terms' means over ``batches`` without dropout, and ``loss``, their weighted sum. All ranks need as many
        batches; of all of them, only the first ``count`` are read into the means."""
        self.module.eval()
        sums, totals = torch.zeros_like(self._sums), torch.zeros_like(self._sums)
        with _own_random_numbers(self.world.device):
            for index, batch in enumerate(batches):
                number = self._number(index)
                _seed(self.world.device, 0, 0, number)
                terms = torch.stack(self._terms(self._moved(batch)))  # by all ranks: FSDP gathers parameters
                if count is None or number < count:
                    sums += terms
                    counts = torch.tensor(self.objective.counts(batch), dtype=torch.float64, device="cpu")
                    totals += counts.to(totals.device)
        means = (self.world.sum(sums) / self.world.sum(totals).clamp(min=1)).tolist()
        self.module.train()
        return {"loss": self.objective.loss(means), **dict(zip(self.objective.terms, means, strict=True))}

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state without that of module and optimizer. Call ``flush`` first."""
        counts = {"completed": self.completed, "skipped": self.skipped, "bad_in_a_row": self._bad_in_a_row}
        return counts if self.fp8 is None else {**counts, "fp8": self.fp8.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state; the module's parameters are loaded before."""
        if self.fp8 is not None:
            self.fp8.load_state_dict(state["fp8"])
        self.completed, self.skipped, self._bad_in_a_row = (
            state[name] for name in ("completed", "skipped", "bad_in_a_row")
        )


@torch.no_grad()
def check_finite(module: nn.Module, world: World | None = None) -> None:
    """Raises ``NonFiniteError``, in all processes of ``world``, if a parameter is not finite: such a model should not
    be saved."""
    names = [name for name, parameter in module.named_parameters() if not bool(_local(parameter).isfinite().all())]
    bad = torch.tensor(float(bool(names)), device=next(module.parameters()).device, dtype=torch.float32)
    if world is not None:
        world.sum(bad)
    if bad:
        where = f"{names[0]} and {len(names) - 1} more" if names else "a parameter of another process"
        raise NonFiniteError(
            f"parameters are not finite after training: {where}; nothing was saved. A smaller learning rate may help"
        )


def _reads_scale(optimizer: Optimizer) -> bool:
    """Whether its step reads ``grad_scale`` and ``found_inf``."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused or getattr(optimizer, "_step_supports_amp_scaling", False)


@contextlib.contextmanager
def _lent(optimizer: Optimizer, **values: Any) -> Iterator[None]:
    """Sets attributes of an optimizer for one step, so that its caller's own steps do not read them."""
    attributes = vars(optimizer)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AsyncMetrics:
    """Copies metrics from the device to the host asynchronously. They are read in order when they have arrived; only if
    more than ``_MAX_PENDING`` are in flight it synchronizes, which also keeps the host from running far ahead."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._waiting: deque[tuple[Any, Tensor, Any]] = deque()

    def put(self, tag: Any, values: Tensor) -> None:
        """Starts a copy of ``values``."""
        if not self.on_gpu:
            self._waiting.append((tag, values.clone(), None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((tag, host, event))

    def take(self, everything: bool = False) -> Iterator[tuple[Any, list[float]]]:
        while self._waiting:
            tag, values, event = self._waiting[0]
            if event is not None and not event.query():
                if not everything and len(self._waiting) <= _MAX_PENDING:
                    return
                event.synchronize()
            self._waiting.popleft()
            yield tag, values.tolist()


def _own_random_numbers(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context that restores the generators' states."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _seed(device: torch.device, *numbers: int) -> None:
    """Sets the generators of the host and of ``device`` to a state that follows from ``numbers``."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
