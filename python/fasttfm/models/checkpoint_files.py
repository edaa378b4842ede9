"""The files of a checkpoint directory: one or several, safetensors or torch's format."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasttfm._atomic_files import atomic_writes, first_line, json_text

CONFIG = "config.json"
LATEST = "latest"  # the newest checkpoint in the directory of a training run
SHARDS = "sharded"  # the folder of a sharded checkpoint, which has no weights in files of their own
SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHARD_BYTES = 5 * 10**9
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class CheckpointError(ValueError):
    """An unusable checkpoint; the message names file and key."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


class CheckpointReader:
    """Tensors by name, from all files of the directory. Tensors are loaded lazily."""

    def __init__(self, directory: Path) -> None:
        self._opened: dict[Path, Any] = {}
        self.files = self._locate(directory)  # the file of every key

    def _locate(self, directory: Path) -> dict[str, Path]:
        looked_for = []
        for name in (SAFETENSORS, TORCH):
            index, whole = directory / f"{name}.index.json", directory / name
            if index.is_file() and whole.is_file():
                _check_same(index, whole)
            if whole.is_file():
                return dict.fromkeys(self._open(whole).keys(), whole)
            if index.is_file():
                return self._indexed(index)
            looked_for += [whole.name, index.name]
        if any((folder / SHARDS).is_dir() for folder in (directory, directory.parent)):  # ELECTRA's are inside
            got = "a sharded checkpoint; --resume continues its run, whose last checkpoint has the weights"
            raise CheckpointError(f"{directory}: expected {SAFETENSORS}, got {got}")
        raise CheckpointError(f"{directory}: expected one of {', '.join(looked_for)}, found none")

    def _indexed(self, index: Path) -> dict[str, Path]:
        files = {}
        for key, name in _weight_map(index).items():
            path = index.parent / str(name)
            if Path(str(name)).name != name or not path.is_file():
                raise CheckpointError(f"{index}: {key}: expected the name of a file in its directory, got {name!r}")
            if key not in self._open(path).keys():  # noqa: SIM118 - safetensors' handle is no mapping
                raise CheckpointError(f"{path}: {key}: expected this key, which the index lists for this file")
            files[key] = path
        return files

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                if path.suffix == ".safetensors":
                    self._opened[path] = safe_open(path, framework="pt")
                else:
                    self._opened[path] = _torch_file(path)
            except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error
            except Exception as error:  # torch.load may raise anything
                raise CheckpointError(f"{path}: cannot be read with weights_only: {first_line(error)}") from error
        return self._opened[path]

    def shape(self, key: str) -> tuple[int, ...]:
        opened = self._open(self.files[key])
        if isinstance(opened, Mapping):
            return tuple(opened[key].shape)
        return tuple(opened.get_slice(key).get_shape())

    def tensor(self, key: str) -> Tensor:
        opened = self._open(self.files[key])
        tensor: Tensor = opened[key] if isinstance(opened, Mapping) else opened.get_tensor(key)
        if tensor.dtype not in _WEIGHTS:
            expected = "weights of 16, 32 or 64 bits (quantized ones are not read)"
            got = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{self.files[key]}: {key}: expected {expected}, got {got}")
        return tensor


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, .safetensors or in torch's format."""
    try:
        return load_file(path) if path.suffix == ".safetensors" else _torch_file(path)
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from error


def _torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file in torch's format. No code in the file runs. Files of torch before 1.6 are not zip
    archives; they cannot be memory-mapped and are read as a whole."""
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(tensors, Mapping):
        raise ValueError(f"expected tensors by name, got {type(tensors).__name__}")
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{key}: expected a tensor, got {type(value).__name__}")
    return dict(tensors)


def _weight_map(index: Path) -> dict[str, Any]:
    """The file of every key, from an index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: expected an object weight_map, got {type(weight_map).__name__}")
    return weight_map


def shard_names(index: Path) -> set[str]:
    """The names of the files that an index lists."""
    return {str(name) for name in _weight_map(index).values()}


def _check_same(index: Path, whole: Path) -> None:
    """Raises if a directory has both an index with its files and a single file with different weights, because either
    may be out of date."""
    others = shard_names(index) - {whole.name}
    if any((index.parent / name).is_file() for name in others):
        raise CheckpointError(
            f"{index.parent}: expected {whole.name} or {index.name}, got both, with different weights; remove the one "
            "that is out of date"
        )


def write_tensors(
    directory: Path,
    tensors: Mapping[str, Tensor],
    shard_bytes: int = SHARD_BYTES,
    *,
    config: Mapping[str, Any],
    config_name: str = CONFIG,
) -> None:
    """Writes ``config.json`` (or ``config_name``) and ``model.safetensors``, or several files and their index if that
    would be larger than ``shard_bytes``.

    All files are written under temporary names and renamed when the last one is on the disk, so a failed save leaves an
    earlier checkpoint unchanged. Files of an earlier checkpoint that the new one does not have are removed at the end.
    A reader between two of these renames finds an incomplete or ambiguous checkpoint, which ``CheckpointReader``
    rejects, but never a mixture of both.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    stem = SAFETENSORS.removesuffix(".safetensors")
    names = [SAFETENSORS]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    whole, index = directory / SAFETENSORS, directory / f"{SAFETENSORS}.index.json"
    sharded = len(shards) > 1
    targets = [directory / name for name in (*names, config_name)] + [index] * sharded
    old = [path for path in directory.glob("*.safetensors") if _SHARD.fullmatch(path.name)]
    stale = [path for path in (index, whole, *old) if path not in targets]
    with atomic_writes(targets, first=[index] * sharded, stale=stale) as partials:
        for name, shard in zip(names, shards, strict=True):
            _write_file(partials[directory / name], shard)
        partials[directory / config_name].write_text(json_text(config, sort_keys=True), encoding="utf-8")
        if sharded:
            weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            total = sum(tensor.nbytes for tensor in tensors.values())
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            partials[index].write_text(json_text(content, sort_keys=True), encoding="utf-8")


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    copies = {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
    }
    save_file(copies, path, metadata={"format": "pt"})
