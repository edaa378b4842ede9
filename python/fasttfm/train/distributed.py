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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fasttfm.nn import PackedLayer
from fasttfm.train.fp8_all_gather import gather_in_fp8
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
        values: list[Any] | None = [None] * self.size if self.main else None
        dist.gather_object(value, values)
        return values or []

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
    place = device_named(device)
    if size == 1:
        return World(place)
    if place.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"device: process {local} of this machine has no GPU; torch sees {torch.cuda.device_count()}"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
        dist.init_process_group("nccl", device_id=place, **_after_restart())
    else:
        dist.init_process_group("gloo", **_after_restart())
    return World(place, rank, size, parallel or "ddp")


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
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or cuda:<number>, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {name} does not exist: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def share_out(module: nn.Module, world: World, *, gradient_dtype: str = "float32", fp8: bool = False) -> nn.Module:
    """The module wrapped for distributed training. FSDP shards every layer, and the modules around the layers.

    Args:
        gradient_dtype: In which ranks send gradients: ``float32`` or ``bfloat16``. Parameters get them in their own.
        fp8: Whether FSDP gathers the weights of layers in FP8 (fp8_all_gather.py).
    """
    halved = gradient_dtype == "bfloat16"
    if world.parallel is None:
        return module
    if world.parallel == "ddp":
        devices = [world.device] if world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
        if halved:
            wrapped.register_comm_hook(None, _sent_in_bf16)
        return wrapped
    if fp8:
        gather_in_fp8(module)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if halved else None)
    for layer in [part for part in module.modules() if isinstance(part, PackedLayer)]:
        fully_shard(layer, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    return module


def _sent_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's hook, which DDP refuses by its name where there is no NCCL; gloo also adds bf16 numbers."""
    return bf16_compress_hook(group, bucket)


_sent_in_bf16.__annotations__.clear()  # DDP compares them with classes, and here they are strings


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
    rows: Tensor = _GatheredRows.apply(x, sizes)
    return rows, sum(sizes[: dist.get_rank()])


class _GatheredRows(torch.autograd.Function):
    """``gathered_rows`` of known numbers of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        rank = dist.get_rank()
        ctx.rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        gathered = x.new_zeros(sum(sizes), *x.shape[1:])
        gathered[ctx.rows] = x
        dist.all_reduce(gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        every = gradient.contiguous().clone()
        dist.all_reduce(every)
        return every[ctx.rows], None


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
