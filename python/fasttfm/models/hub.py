"""The directory of a checkpoint: a local one, or a model of the Hugging Face hub in its cache."""

from __future__ import annotations

import difflib
import enum
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from fasttfm import _extras
from fasttfm._atomic_files import first_line
from fasttfm.models.checkpoint_files import CONFIG, SAFETENSORS, TORCH, CheckpointError, shard_names

_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
GLINER_CONFIG = "gliner_config.json"  # of GLiNER's releases, instead of config.json
_CONFIGS = (CONFIG, GLINER_CONFIG)
# The tokenizer files; the first that exists is read.
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
_SMALL_SUFFIXES = (".json", ".txt", ".model")  # the configuration, the tokenizer and their relatives
_ANSWER_SECONDS = 5.0  # the timeout of the hub's answer; HF_HUB_ETAG_TIMEOUT overrides it
_MODULE = re.compile(r"\d+_\w+/(?:config\.json|model\.safetensors|pytorch_model\.bin)")  # of sentence-transformers


class Part(enum.Enum):
    """A part of a model's files."""

    CONFIG = "configuration"
    TOKENIZER = "tokenizer"
    WEIGHTS = "weights"  # and the configuration that describes them


def model_directory(
    name: str | Path, part: Part = Part.WEIGHTS, *, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The directory of a model: ``name`` itself if it is a directory, otherwise a snapshot of the hub model ``name``.

    The hub's local cache is read first, and the network is not used if it has the files. Otherwise the files that
    fasttfm reads are downloaded to the cache with huggingface_hub: configuration and tokenizer, and for
    ``Part.WEIGHTS`` one set of weights, safetensors if there are any. If the hub does not answer within 5 seconds
    (``HF_HUB_ETAG_TIMEOUT``), it counts as unreachable. ``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_TOKEN`` and its other
    variables are respected.

    Args:
        name: A directory; or, as a string, a hub id such as ``"bert-base-uncased"`` or ``"org/name"``, followed by
            ``@revision`` for a specific one.
        part: The part to read.
        revision: A branch, tag or commit of the hub's model.
        token: An access token of the hub for private models; by default the one that the user has logged in with.

    Raises:
        CheckpointError: There is neither such a directory nor such a model, or the model cannot be downloaded.
    """
    path = Path(name)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{name}: revision: expected none with a directory, got {revision!r}")
        return path
    if path.exists():
        raise CheckpointError(f"{name}: expected a directory with a model, got a file")
    if not isinstance(name, str):
        raise CheckpointError(f"{name}: expected a directory with a model, there is none")
    repository, at, stated = name.partition("@")
    if at and revision not in (None, stated):
        raise ValueError(f"{name}: revision: expected one, got {stated!r} and {revision!r}")
    revision = stated if at else revision
    if _HUB_ID.fullmatch(repository) is None or "--" in repository or ".." in repository or revision == "":
        raise CheckpointError(f"{name}: expected a directory with a model or a hub id; there is no such directory")
    hub = _hub(name)
    cached = _snapshot(hub, repository, revision)
    if cached is not None and _has(cached, part):
        return cached
    if hub.constants.HF_HUB_OFFLINE:
        _raise_offline(hub, repository, revision, None if cached is None else part)
    return _download(hub, repository, revision, token, part)


def _hub(name: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise CheckpointError(
            f"{name}: there is no such path; reading a model of this name from the Hugging Face hub needs "
            f"huggingface_hub: {_extras.how_to_install('hub')}"
        ) from None
    return huggingface_hub


def _snapshot(hub: ModuleType, name: str, revision: str | None) -> Path | None:
    """The folder of the model in the hub's cache, if it has any file that we read."""
    for file in (*_CONFIGS, *TOKENIZER_FILES):
        cached = hub.try_to_load_from_cache(name, file, revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def _has(snapshot: Path, part: Part) -> bool:
    """Whether a folder of the cache has this part of the model."""
    names = {path.name for path in snapshot.iterdir() if path.is_file()}
    if part is Part.TOKENIZER:
        return not names.isdisjoint(TOKENIZER_FILES)
    has_config = not names.isdisjoint(_CONFIGS)
    if part is Part.CONFIG or not has_config:
        return has_config
    chosen = weight_files(names)
    index = next((name for name in chosen if name.endswith(".index.json")), None)
    return bool(chosen) and (index is None or names.issuperset(shard_names(snapshot / index)))


def weight_files(names: Iterable[str]) -> list[str]:
    """The weight files that ``CheckpointReader`` reads, out of a model's files."""
    present = set(names)
    for whole in (SAFETENSORS, TORCH):
        if whole in present:
            return [whole]
        if (index := f"{whole}.index.json") in present:
            stem, _, suffix = whole.partition(".")
            shard = re.compile(rf"{stem}-\d+-of-\d+\.{suffix}")
            return [index, *sorted(name for name in present if shard.fullmatch(name))]
    return []


def _download(hub: ModuleType, name: str, revision: str | None, token: str | bool | None, part: Part) -> Path:
    options = {"revision": revision, "token": token}
    try:
        # One request without retries: `list_repo_files` tries for half a minute if there is no network.
        answer = hub.model_info(name, timeout=_answer_seconds(hub), **options)
        names = [file.rfilename for file in answer.siblings or ()]
        patterns = [file for file in names if _is_small(file)]
        if part is Part.WEIGHTS:
            chosen = weight_files(names)
            if not chosen:
                got = ", ".join(file for file in names if not _is_small(file)) or "none"
                raise CheckpointError(f"{name}: the hub's model has no {SAFETENSORS} and no {TORCH}; its files: {got}")
            patterns += chosen
        source = f"{hub.constants.ENDPOINT}/{name}"
        warnings.warn(f"{name}: there is no such path; downloading {source} to the hub's cache", stacklevel=2)
        return Path(hub.snapshot_download(name, allow_patterns=patterns, **options))
    except CheckpointError:
        raise
    except Exception as error:  # of huggingface_hub, its HTTP library or the system
        _raise_readable(hub, name, revision, error)


def _answer_seconds(hub: ModuleType) -> float:
    """The timeout of the request for a model's list of files."""
    return hub.constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else _ANSWER_SECONDS


def _is_small(file: str) -> bool:
    is_index = file.endswith(".index.json")
    return bool(_MODULE.fullmatch(file)) or ("/" not in file and file.endswith(_SMALL_SUFFIXES) and not is_index)


def _raise_readable(hub: ModuleType, name: str, revision: str | None, error: Exception) -> NoReturn:
    """Raises a CheckpointError with one sentence for each of the hub's errors."""
    errors = hub.errors
    where = hub.constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        reason = f"accept its terms at {where}/{name} and log in with `hf auth login`, or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = f"the model at {where}/{name} has no revision {revision!r}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = f"there is no such path here and no such model at {where}{_similar(hub, name)}; a private one "
        reason += "needs `hf auth login` or HF_TOKEN"
    else:
        reason = f"there is no such path here, it is not in the hub's cache ({hub.constants.HF_HUB_CACHE}), and "
        reason += f"{where} cannot be reached: {first_line(error)}{_similar(hub, name)}"
    raise CheckpointError(f"{name}: {reason}") from error


def _raise_offline(hub: ModuleType, name: str, revision: str | None, absent: Part | None) -> NoReturn:
    """Raises a CheckpointError; ``absent`` is the missing part of a model that the cache has."""
    cache = hub.constants.HF_HUB_CACHE
    if absent is not None:
        reason = f"the hub's cache ({cache}) has a part of this model, but not its {absent.value}"
    else:
        which = f"no revision {revision!r} of such a model" if revision else "no such model"
        reason = f"there is no such path, and the hub's cache ({cache}) has {which}{_similar(hub, name)}"
    raise CheckpointError(f"{name}: {reason}; HF_HUB_OFFLINE is set, so it is not downloaded")


def _similar(hub: ModuleType, name: str) -> str:
    """A hint with models of the cache whose names are similar, for mistyped names."""
    folders = Path(hub.constants.HF_HUB_CACHE).glob("models--*")
    names = [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]
    similar = difflib.get_close_matches(name, names, n=3, cutoff=0.8)
    return f" (in the cache: {', '.join(similar)})" if similar else ""
