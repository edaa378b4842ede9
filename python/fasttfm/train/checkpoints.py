"""Checkpoints of a run: directories that are written atomically.

``checkpoint-000200`` has the files of ``save_pretrained`` of model and tokenizer, so that transformers can open it, and
``training_state.pt`` (optimizer, random number generators, position in the data) and ``manifest.json`` (size and
checksum of every file). It is written under another name, synced to disk and renamed; ``latest`` is a link to the
newest.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fasttfm._atomic_files import first_line, sync_file
from fasttfm.models import CheckpointError
from fasttfm.models.checkpoint_files import LATEST
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.train.distributed import World, like, whole
from fasttfm.train.sharded_optimizer import ShardedOptimizer, parameters_with_state

MANIFEST = "manifest.json"
STATE = "training_state.pt"
_PARTIAL = ".partial"
_REPLACED = ".replaced"  # the suffix of a checkpoint while another one of the same step replaces it
_NAME = re.compile(r"checkpoint-(\d{6,})")


class Checkpoints:
    """The checkpoints in a run's directory.

    Args:
        directory: The run's directory.
        keep: How many of the newest checkpoints are kept.
    """

    def __init__(self, directory: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 checkpoint, got {keep}")
        self.directory = directory
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        if not self.directory.is_dir():
            return []
        names = [_NAME.fullmatch(path.name) for path in self.directory.iterdir()]
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        return self.directory / f"checkpoint-{step:06d}"

    def newest(self) -> Path | None:
        """The newest checkpoint after a check; None if there is none. Raises ``CheckpointError`` if it is damaged."""
        steps = self.steps()
        if not steps:
            return None
        newest = self.path(steps[-1])
        try:
            check(newest)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._advice(steps[:-1])}") from error
        return newest

    def _advice(self, earlier: list[int]) -> str:
        for step in reversed(earlier):
            with contextlib.suppress(CheckpointError):
                check(self.path(step))
                return f"{self.path(step)} is complete: remove the damaged one to resume from there"
        return "there is no other that is whole"

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Saves the checkpoint of ``step``: ``write`` writes its files into a given directory.

        Any failure before the rename, such as a full disk, raises ``CheckpointError`` and leaves earlier checkpoints
        unchanged.
        """
        final = self.path(step)
        partial = final.with_name(final.name + _PARTIAL)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove(partial)
            partial.mkdir()
            write(partial)
            _write_manifest(partial)
            _sync(partial)
            self._put_in_place(partial, final)
            self._link(final)
        except Exception as error:
            with contextlib.suppress(OSError):
                _remove(partial)
            steps = self.steps()
            kept = f"the last whole one is {self.path(steps[-1])}" if steps else "there is none before it"
            raise CheckpointError(
                f"{final}: this checkpoint could not be written: {first_line(error)}; {kept}"
            ) from error
        for old in self.steps()[: -self.keep]:
            self._discard(self.path(old))
        return final

    def remove(self) -> None:
        """Removes all checkpoints."""
        (self.directory / LATEST).unlink(missing_ok=True)
        for step in self.steps():
            self._discard(self.path(step))

    def clean(self) -> None:
        """Removes what an interrupted ``save`` left, and restores a checkpoint that it was about to replace."""
        if not self.directory.is_dir():
            return
        for path in self.directory.glob(f"*{_PARTIAL}"):
            _remove(path)
        for replaced in self.directory.glob(f"*{_REPLACED}"):
            final = replaced.with_suffix("")
            if final.exists():
                _remove(replaced)
            else:
                os.rename(replaced, final)

    def _put_in_place(self, partial: Path, final: Path) -> None:
        """Renames a finished checkpoint. An earlier one of the same step is removed when the new one has its name."""
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():
            _remove(replaced)
            os.rename(final, replaced)
        os.rename(partial, final)
        _sync_directory(self.directory)
        _remove(replaced)

    def _discard(self, path: Path) -> None:
        """Removes a checkpoint by one rename, so that a partly removed one is never mistaken for a checkpoint."""
        if path.exists():
            away = path.with_name(f"{path.name}.old{_PARTIAL}")
            _remove(away)
            os.rename(path, away)
            _remove(away)

    def _link(self, path: Path) -> None:
        link = self.directory / f"{LATEST}{_PARTIAL}"
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(path.name)
        os.replace(link, self.directory / LATEST)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)


def _write_manifest(directory: Path) -> None:
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "crc32": _checksum(path)}
        for path in _files(directory)
    }
    (directory / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            value = zlib.crc32(part, value)
    return value


def _sync(directory: Path) -> None:
    """Syncs every file and folder to disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            sync_file(path)
        else:
            _sync_directory(path)
    _sync_directory(directory)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(directory: Path) -> None:
    """Raises ``CheckpointError`` unless every file has the size and checksum of the manifest."""
    manifest = directory / MANIFEST
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["bytes"], entry["crc32"]) for name, entry in files.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no checkpoint of a training run: there is no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest}: cannot be read: {error}") from error
    for name, (size, checksum) in expected.items():
        path = directory / name
        try:
            actual = path.stat().st_size
            intact = actual == size and _checksum(path) == checksum
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        if actual != size:
            raise CheckpointError(f"{path}: damaged: expected {size} bytes, got {actual}")
        if not intact:
            raise CheckpointError(f"{path}: damaged: the checksum differs from the manifest's")


# ---- contents of a checkpoint ----------------------------------------------------------------------------------------


class ModelFiles:
    """Writes and reads a model that may be sharded over processes.

    Args:
        model: The model, before it is wrapped for distributed training.
    """

    def __init__(self, model: PretrainedModel, world: World) -> None:
        self.model = model
        self.world = world
        self._blank = copy.deepcopy(model).to("meta") if world.parallel == "fsdp" else None

    def writer(self) -> Callable[[Path], None]:
        """Returns a function that writes the model. All processes call this, because a sharded model is gathered."""
        if self._blank is None:
            return self.model.save_pretrained
        blank = self._blank
        state = {name: whole(value.detach()).cpu() for name, value in self.model.state_dict().items()}

        def write(directory: Path) -> None:
            blank.load_state_dict(state, assign=True)
            blank.tie_weights()
            blank.save_pretrained(directory)

        return write

    @torch.no_grad()
    def read(self, directory: Path) -> None:
        """Copies the checkpoint's tensors to the parameters."""
        saved = type(self.model).from_pretrained(directory)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(like(saved.get_parameter(name).detach(), parameter))


def optimizer_state(optimizer: Optimizer) -> dict[int, Any]:
    """Copies of every parameter's state, gathered on the CPU. All processes call this if the optimizer is sharded; then
    only the main process gets them."""
    state = optimizer.whole_state() if isinstance(optimizer, ShardedOptimizer) else optimizer.state_dict()["state"]

    def copied(value: Any) -> Any:
        return whole(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    return {index: {name: copied(value) for name, value in entry.items()} for index, entry in state.items()}


def load_optimizer_state(optimizer: Optimizer, state: Mapping[int, Any]) -> None:
    parameters = parameters_with_state(optimizer)
    shared = {
        index: {
            name: like(value, parameters[index]) if isinstance(value, torch.Tensor) else value
            for name, value in entry.items()
        }
        for index, entry in state.items()
        if index in parameters
    }
    optimizer.load_state_dict({"state": shared, "param_groups": optimizer.state_dict()["param_groups"]})


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        if "cuda" not in state:
            raise CheckpointError("this checkpoint was written by a run on a CPU; resume with --device cpu")
        torch.cuda.set_rng_state(state["cuda"], device)


def write_state(directory: Path, state: Mapping[str, Any]) -> None:
    torch.save(dict(state), directory / STATE)


def read_state(directory: Path) -> dict[str, Any]:
    """Reads ``training_state.pt``; no code in it runs."""
    path = directory / STATE
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file: nothing to resume from") from None
    except Exception as error:  # torch.load may raise anything
        raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: expected a dictionary, got {type(loaded).__name__}")
    return loaded


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of the settings that differ."""
    return [
        f"{name.replace('_', ' ')} was {then.get(name)}, is {now.get(name)}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
