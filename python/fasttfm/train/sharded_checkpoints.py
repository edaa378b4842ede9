"""Sharded checkpoints: every process writes its part of model and optimizer in the background, and reads what it needs.

``checkpoint-000200/sharded`` is a directory of ``torch.distributed.checkpoint`` (DCP), which another number of ranks
can read. Next to it are the configuration, the tokenizer and ``training_state.pt`` with the rest of the state. The
files get the checkpoint's name when all processes have written theirs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from fasttfm._atomic_files import first_line
from fasttfm.models import CheckpointError
from fasttfm.models.checkpoint_files import SHARDS
from fasttfm.train.checkpoints import Checkpoints
from fasttfm.train.distributed import World
from fasttfm.train.sharded_optimizer import parameters_with_state

_ONE_PROCESS = r"torch\.distributed is (disabled, )?unavailable or uninitialized"  # DCP's warning
_OPTIMIZER = "optimizer."
Tensors = dict[str, dict[str, Tensor]]  # of model and optimizer, by name


class ShardedCheckpoints:
    """Saves sharded checkpoints while the training goes on, one at a time.

    Args:
        checkpoints: The checkpoints of the run.
        world: The processes, all of which make this object.
    """

    def __init__(self, checkpoints: Checkpoints, world: World) -> None:
        self.checkpoints = checkpoints
        self.world = world
        # A group of its own: the background's collectives must not mix with those of the training.
        self._group: Any = dist.new_group(backend="gloo") if world.size > 1 else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fasttfm-checkpoint")
        self._saving: Future[None] | None = None
        if world.size == 1:
            warnings.filterwarnings("ignore", message=_ONE_PROCESS)

    def start(self, step: int, tensors: Tensors, write: Callable[[Path], None]) -> None:
        """Copies this process's ``tensors`` and starts to save them as the checkpoint of ``step``. All processes call
        this; it waits for the checkpoint before.

        Args:
            write: Writes the other files into a given directory, in the main process.
        """
        self.wait()
        final = self.checkpoints.path(step)
        partial = final.with_name(f"{final.name}.{SHARDS}.partial")  # which ``Checkpoints.clean`` removes

        def prepare() -> None:
            if self.world.main:
                self.checkpoints.clean()
                partial.mkdir(parents=True)

        try:
            self.world.main_first(prepare)
            writer = dcp.FileSystemWriter(partial)
            ranks: dict[str, Any] = {"no_dist": True} if self._group is None else {"process_group": self._group}
            written: Any = dcp.async_save(tensors, storage_writer=writer, **ranks)
        except OSError as error:
            raise self._failure(step, error) from error
        self._saving = self._executor.submit(self._finish, step, partial, written, write)

    def _finish(self, step: int, partial: Path, written: Future[Any], write: Callable[[Path], None]) -> None:
        """Waits until all processes have written their parts; then the main process completes the checkpoint."""
        try:
            written.result()
        except (Exception, dcp.api.CheckpointException) as error:  # the latter is none of Exception's
            raise self._failure(step, error) from error
        if not self.world.main:
            return

        def complete(directory: Path) -> None:
            partial.rename(directory / SHARDS)
            write(directory)

        self.checkpoints.save(step, complete)

    def _failure(self, step: int, error: BaseException) -> CheckpointError:
        reasons = list(getattr(error, "failures", {}).values())  # of each rank: the error and its traceback
        reason = first_line(reasons[0][0] if reasons else error)
        return CheckpointError(f"{self.checkpoints.path(step)}: this checkpoint could not be written: {reason}")

    def wait(self) -> None:
        """Waits until the last checkpoint is complete. Raises ``CheckpointError`` if it could not be written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()


def tensors_of(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """The tensors of a sharded checkpoint that this process has."""
    states = optimizer.state_dict()["state"].items()
    return {
        "model": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "optimizer": {f"{index}.{name}": value for index, entry in states for name, value in entry.items()},
    }


@torch.no_grad()
def read(directory: Path, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Reads the parameters of the model and the state of the optimizer, sharded or not. All processes call this."""
    shards = directory / SHARDS
    parameters = parameters_with_state(optimizer)
    tensors: Tensors = {
        "model": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "optimizer": {},
    }
    state: dict[int, dict[str, Tensor]] = {}
    try:
        reader = dcp.FileSystemReader(shards)
        for key, entry in reader.read_metadata().state_dict_metadata.items():
            if key.startswith(_OPTIMIZER):
                key = key.removeprefix(_OPTIMIZER)
                index, _, name = key.partition(".")
                if (parameter := parameters.get(int(index))) is not None:
                    tensor = tensors["optimizer"][key] = _blank(entry, parameter)
                    state.setdefault(int(index), {})[name] = tensor
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ONE_PROCESS)
            dcp.load(tensors, storage_reader=reader, no_dist=world.size == 1)
    except (Exception, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{shards}: cannot be read: {first_line(error)}") from error
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _blank(entry: Any, parameter: Tensor) -> Tensor:
    """A tensor to read into: distributed as the parameter, unless it has another shape, as a counter has."""
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
