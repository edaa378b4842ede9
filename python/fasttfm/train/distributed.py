"""One process, or several under ``torchrun``: the processes of a run, and DDP or FSDP2 for a module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fasttfm.nn import PackedLayer
from fasttfm.train.settings import one_of

PARALLEL = ("ddp", "fsdp")
Value = TypeVar("Value")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    device: torch.device
    rank: int = 0
    size: int = 1
    parallel: str | None = None

    @property
    def main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds up the tensor of every process, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, in order, in the main process; an empty list in the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.main else None
        dist.gather_object(value, found)
        return found or []

    def agree(self, value: bool) -> bool:
        """The main process's value, in all processes."""
        if self.size == 1:
            return value
        return bool(self.sum(torch.tensor(float(value and self.main), device=self.device, dtype=torch.float32)))

    def main_first(self, work: Callable[[], Value]) -> Value:
        """Runs ``work`` in the main process while the others wait, then in the others, which find the files it
        wrote."""
        if self.size == 1:
            return work()
        failure: BaseException | None = None
        if self.main:
            try:
                result = work()
            except Exception as error:  # otherwise the other processes would wait forever
                failure = error
        said = [None if failure is None else f"{type(failure).__name__}: {failure}"]
        dist.broadcast_object_list(said)
        if failure is not None:
            raise failure
        if said[0] is not None:
            raise RuntimeError(f"rank 0 failed: {said[0]}")
        return result if self.main else work()

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(device: str | None = None, parallel: str | None = None) -> World:
    """Joins the processes that ``torchrun`` started; without it, a world of one process.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:<number>``; by default a GPU if torch sees one. Under torchrun every process
            of a machine uses the GPU with its local rank.
        parallel: ``ddp`` (default) or ``fsdp``.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if parallel is not None:
        one_of("parallel", parallel, PARALLEL)
        if "WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"parallel: {parallel} needs several processes: torchrun --nproc-per-node N -m fasttfm ..."
            )
    found = device_named(device)
    if size == 1:
        return World(found)
    if found.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"device: process {local} of this machine has no GPU; torch sees {torch.cuda.device_count()}"
            )
        found = torch.device("cuda", local)
        torch.cuda.set_device(found)
        dist.init_process_group("nccl", device_id=found, **_after_restart())
    else:
        dist.init_process_group("gloo", **_after_restart())
    return World(found, rank, size, parallel or "ddp")


def _after_restart() -> dict[str, Any]:
    """A store of its own for processes that torchrun has restarted: its store has the addresses of those before."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if count == 0:
        return {}
    store, rank, size = next(iter(dist.rendezvous("env://")))
    return {"store": dist.PrefixStore(f"restart-{count}", store), "rank": rank, "world_size": size}


def device_named(name: str | None) -> torch.device:
    """The device of that name, or a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or cuda:<number>, got {name!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {name} does not exist: torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def share_out(module: nn.Module, world: World) -> nn.Module:
    """The module wrapped for distributed training. FSDP shards every layer, and the modules around the layers."""
    if world.parallel is None:
        return module
    if world.parallel == "ddp":
        devices = [world.device] if world.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
    for layer in [each for each in module.modules() if isinstance(each, PackedLayer)]:
        fully_shard(layer)
    fully_shard(module)
    return module


@contextlib.contextmanager
def gradients_summed(module: nn.Module, last: bool) -> Iterator[None]:
    """A context for a forward and backward: gradients of all processes are reduced only in a step's ``last`` batch."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    yield


def gathered_rows(x: Tensor) -> tuple[Tensor, int]:
    """The rows of all processes, in their order, and the number of this process's first one. Processes may have
    different numbers of rows. A row's gradient is the sum of those that all processes have for it."""
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=x.device)
    counts[dist.get_rank()] = len(x)
    dist.all_reduce(counts)
    sizes = counts.tolist()
    found: Tensor = _GatheredRows.apply(x, sizes)
    return found, sum(sizes[: dist.get_rank()])


class _GatheredRows(torch.autograd.Function):
    """``gathered_rows`` of known numbers of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        rank = dist.get_rank()
        ctx.own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        gathered = x.new_zeros(sum(sizes), *x.shape[1:])
        gathered[ctx.own] = x
        dist.all_reduce(gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        every = gradient.contiguous().clone()
        dist.all_reduce(every)
        return every[ctx.own], None


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor that is sharded over processes; returns others unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor on the device of ``parameter``, and sharded as it is."""
    if tensor.shape != parameter.shape:  # a counter
        return tensor
    moved = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements)
    return moved
