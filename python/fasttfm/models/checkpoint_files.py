"""The files of a checkpoint directory: one or several, safetensors or torch's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fasttfm.whole_files import whole_file, write_json

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
SHARD_BYTES = 5 * 10**9


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it is said to be; the message names file and key."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


class CheckpointReader:
    """Tensors by name, wherever in the directory they are. Nothing is loaded before it is asked for."""

    def __init__(self, directory: Path) -> None:
        self._opened: dict[Path, Any] = {}
        self.files = self._locate(directory)  # the file of every key

    def _locate(self, directory: Path) -> dict[str, Path]:
        looked_for = []
        for name in (SAFETENSORS, TORCH):
            index, whole = directory / f"{name}.index.json", directory / name
            if index.is_file():
                return self._indexed(index)
            if whole.is_file():
                return dict.fromkeys(self._open(whole).keys(), whole)
            looked_for += [whole.name, index.name]
        raise CheckpointError(f"{directory}: expected one of {', '.join(looked_for)}, found none")

    def _indexed(self, index: Path) -> dict[str, Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: expected an object weight_map, got {type(weight_map).__name__}")
        files = {}
        for key, name in weight_map.items():
            path = index.parent / str(name)
            if Path(str(name)).name != name or not path.is_file():
                raise CheckpointError(f"{index}: {key}: expected the name of a file beside it, got {name!r}")
            if key not in self._open(path).keys():  # noqa: SIM118 - safetensors' handle is no mapping
                raise CheckpointError(f"{path}: {key}: the index says that it is here; it is not")
            files[key] = path
        return files

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                if path.suffix == ".safetensors":
                    self._opened[path] = safe_open(path, framework="pt")
                else:
                    self._opened[path] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            except Exception as error:  # torch.load has its own idea of what it may raise
                raise CheckpointError(f"{path}: cannot be read with weights_only: {error}") from error
            if isinstance(self._opened[path], Mapping):
                for key, value in self._opened[path].items():
                    if not isinstance(value, Tensor):
                        raise CheckpointError(f"{path}: {key}: expected a tensor, got {type(value).__name__}")
        return self._opened[path]

    def shape(self, key: str) -> tuple[int, ...]:
        opened = self._open(self.files[key])
        if isinstance(opened, Mapping):
            return tuple(opened[key].shape)
        return tuple(opened.get_slice(key).get_shape())

    def tensor(self, key: str) -> Tensor:
        opened = self._open(self.files[key])
        tensor: Tensor = opened[key] if isinstance(opened, Mapping) else opened.get_tensor(key)
        return tensor


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes ``model.safetensors``, or several files and their index where it would be larger than ``shard_bytes``."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        _write_file(directory / SAFETENSORS, shards[0])
        return
    stem = SAFETENSORS.removesuffix(".safetensors")
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / f"{SAFETENSORS}.index.json", index, sort_keys=True)


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    copies = {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
    }
    with whole_file(path) as partial:
        save_file(copies, partial, metadata={"format": "pt"})
