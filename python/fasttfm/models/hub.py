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

from fasttfm import extras
from fasttfm.atomic_files import first_line
from fasttfm.models.checkpoint_files import CONFIG, SAFETENSORS, TORCH, CheckpointError, shard_names

_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
# One of these is a tokenizer; the first that is there is read.
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
_SMALL_SUFFIXES = (".json", ".txt", ".model")  # the configuration, the tokenizer and their relatives
_ANSWER_SECONDS = 5.0  # of the hub; HF_HUB_ETAG_TIMEOUT sets another
_MODULE = re.compile(r"\d+_\w+/(?:config\.json|model\.safetensors|pytorch_model\.bin)")  # of sentence-transformers


class Part(enum.Enum):
    """What is read of a model."""

    CONFIG = "configuration"
    TOKENIZER = "tokenizer"
    WEIGHTS = "weights"  # and the configuration that describes them


def model_directory(
    name: str | Path, part: Part = Part.WEIGHTS, *, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The directory of a model: ``name`` itself if it is one, otherwise a snapshot of the hub's model of this name.

    The hub's local cache is read first, and nothing is asked of the network if it has what is needed. Otherwise the
    files that fasttfm reads are downloaded to the cache with huggingface_hub: configuration and tokenizer, and for
    ``Part.WEIGHTS`` one set of weights, safetensors if there are any. A hub that does not
    answer within 5 seconds (``HF_HUB_ETAG_TIMEOUT``) cannot be reached. ``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_TOKEN``
    and its other variables are respected.

    Args:
        name: A directory; or, as a string, a hub id such as ``"bert-base-uncased"`` or ``"org/name"``, followed by
            ``@revision`` if a certain one is needed.
        part: What is read of it.
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
        raise CheckpointError(f"{name}: expected a directory with a model or a hub id, there is no such directory")
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
            f"huggingface_hub: {extras.how_to_install('hub')}"
        ) from None
    return huggingface_hub


def _snapshot(hub: ModuleType, name: str, revision: str | None) -> Path | None:
    """The folder of the model in the hub's cache, if anything of it that we read is there."""
    for file in (CONFIG, *TOKENIZER_FILES):
        found = hub.try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _has(snapshot: Path, part: Part) -> bool:
    """Whether a folder of the cache has this part of the model."""
    names = {path.name for path in snapshot.iterdir() if path.is_file()}
    if part is Part.TOKENIZER:
        return not names.isdisjoint(TOKENIZER_FILES)
    if part is Part.CONFIG or CONFIG not in names:
        return CONFIG in names
    chosen = weight_files(names)
    index = next((name for name in chosen if name.endswith(".index.json")), None)
    return bool(chosen) and (index is None or names.issuperset(shard_names(snapshot / index)))


def weight_files(names: Iterable[str]) -> list[str]:
    """The files of a model's weights that ``CheckpointReader`` reads, and no others, out of a model's files."""
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
        # One request, which is not repeated: `list_repo_files` tries for half a minute where there is no network.
        answer = hub.model_info(name, timeout=_answer_seconds(hub), **options)
        found = [file.rfilename for file in answer.siblings or ()]
        wanted = [file for file in found if _is_small(file)]
        if part is Part.WEIGHTS:
            chosen = weight_files(found)
            if not chosen:
                got = ", ".join(file for file in found if not _is_small(file)) or "none"
                raise CheckpointError(f"{name}: the hub's model has no {SAFETENSORS} and no {TORCH}; its files: {got}")
            wanted += chosen
        source = f"{hub.constants.ENDPOINT}/{name}"
        warnings.warn(f"{name}: there is no such path; downloading {source} to the hub's cache", stacklevel=2)
        return Path(hub.snapshot_download(name, allow_patterns=wanted, **options))
    except CheckpointError:
        raise
    except Exception as error:  # of huggingface_hub, its HTTP library or the system
        _raise_in_words(hub, name, revision, error)


def _answer_seconds(hub: ModuleType) -> float:
    """How long the hub has to say which files a model has."""
    return hub.constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else _ANSWER_SECONDS


def _is_small(file: str) -> bool:
    is_index = file.endswith(".index.json")
    return bool(_MODULE.fullmatch(file)) or ("/" not in file and file.endswith(_SMALL_SUFFIXES) and not is_index)


def _raise_in_words(hub: ModuleType, name: str, revision: str | None, error: Exception) -> NoReturn:
    """The hub's refusals in one sentence each."""
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
    """``absent`` is what the cache lacks of a model that it has."""
    cache = hub.constants.HF_HUB_CACHE
    if absent is not None:
        reason = f"the hub's cache ({cache}) has a part of this model, but not its {absent.value}"
    else:
        which = f"no revision {revision!r} of such a model" if revision else "no such model"
        reason = f"there is no such path, and the hub's cache ({cache}) has {which}{_similar(hub, name)}"
    raise CheckpointError(f"{name}: {reason}; HF_HUB_OFFLINE is set, so it is not downloaded")


def _similar(hub: ModuleType, name: str) -> str:
    """Models of the cache with a similar name: a mistyped one is recognized."""
    folders = Path(hub.constants.HF_HUB_CACHE).glob("models--*")
    names = [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]
    similar = difflib.get_close_matches(name, names, n=3, cutoff=0.8)
    return f" (in the cache: {', '.join(similar)})" if similar else ""
