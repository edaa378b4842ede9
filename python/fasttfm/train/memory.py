"""How much memory pre-training needs, roughly, and how much there is."""

from __future__ import annotations

import dataclasses
import resource
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from fasttfm.models.families import FAMILIES
from fasttfm.nn.packed_transformer import PackedTransformer
from fasttfm.train.pretrain_parts import blank_model
from fasttfm.train.run_directory import RunError
from fasttfm.train.settings import PretrainSettings

_STORED_PER_LAYER = 17  # numbers per token and feature that a layer stores for its backward (Korthikanti et al., 2022)


@dataclass(frozen=True)
class MemoryNeed:
    """What a training needs in bytes."""

    parameters: int  # their number
    activations: int  # bytes, roughly

    @property
    def weights(self) -> int:
        """Bytes of the parameters in fp32; gradients need as many, the optimizer's two moments twice as many."""
        return 4 * self.parameters

    @property
    def certain(self) -> int:
        return 4 * self.weights

    @property
    def total(self) -> int:
        return self.certain + self.activations

    def __str__(self) -> str:
        count = f"{self.parameters / 1e6:,.0f} million"
        return (
            f"about {_gib(self.total)}: {count} parameters in fp32 ({_gib(self.weights)}), their gradients "
            f"({_gib(self.weights)}), the optimizer's moments ({_gib(2 * self.weights)}) and activations "
            f"(about {_gib(self.activations)})"
        )


def needed(settings: PretrainSettings, *, processes: int = 1) -> MemoryNeed:
    """What a process of a run needs.

    Args:
        processes: Those that share the tokens of a step.
    """
    model = blank_model(settings)
    tokens = max(settings.max_length, settings.tokens_per_step // (settings.batches_per_step or processes))
    stacks = [module for module in model.modules() if isinstance(module, PackedTransformer)]
    widths = sum(layer.width for stack in stacks for layer in stack.in_order())
    size = 4 if settings.step.precision == "float32" else 2
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return MemoryNeed(parameters, _STORED_PER_LAYER * tokens * widths * size)


def available(device: torch.device) -> int | None:
    """The bytes that are free for this process; None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_free_memory(), _left_in_group(), _left_for_process()]
    return min((limit for limit in limits if limit is not None), default=None)


def check_memory(
    settings: PretrainSettings, device: torch.device, *, processes: int = 1, shards: int = 1, optimizer_shards: int = 1
) -> None:
    """Raises RunError if the parameters, their gradients and the optimizer's moments of a run do not fit into the free
    memory, and warns if they do not with the activations.

    Args:
        processes: Those that share the tokens of a step.
        shards: Those that share the parameters and their gradients.
        optimizer_shards: Those that share the optimizer's moments.
    """
    free = available(device)
    if free is None:
        return
    need = needed(settings, processes=processes)
    certain = 2 * need.weights // shards + 2 * need.weights // optimizer_shards
    if certain + need.activations <= free:
        return
    title = f"{settings.family} {settings.size or settings.init}"
    got = f"{_gib(free)} of free memory on {device}"
    among = f", of which each of {shards} processes has its part" if shards > 1 else ""
    if optimizer_shards > shards:
        among = f", of whose moments each of {optimizer_shards} processes has its part"
    if certain > free:
        raise RunError(f"{title}: training needs {need}{among}; got {got}; {_advice(settings, free, processes)}")
    warnings.warn(f"{title}: training needs {need}{among}; there are {got}", stacklevel=2)


def _advice(settings: PretrainSettings, free: int, processes: int) -> str:
    """The largest size of the family that fits."""
    fits = None
    for size in () if settings.init is not None else FAMILIES[settings.family].sizes:
        need = needed(dataclasses.replace(settings, size=size), processes=processes)
        if need.total <= free and (fits is None or need.total > fits[0]):
            fits = need.total, size
    if fits is None:
        return "no size of this family fits" if settings.init is None else "a smaller checkpoint may fit"
    return f"--size {fits[1]} fits, with about {_gib(fits[0])}"


def _free_memory() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return None


def _left_in_group() -> int | None:
    """What the control group of a container leaves."""
    group = Path("/sys/fs/cgroup")
    limit, used = (_lines(group / name) for name in ("memory.max", "memory.current"))
    return int(limit[0]) - int(used[0]) if limit and used and limit[0] != "max" else None


def _left_for_process() -> int | None:
    """What the limit of the address space (``ulimit -v``) leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _lines(Path("/proc/self/statm"))
    if limit == resource.RLIM_INFINITY or not used:
        return None
    return limit - int(used[0].split()[0]) * resource.getpagesize()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
