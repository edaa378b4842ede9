"""``ServedModel``: a model with what it can compute; ``load``: opens one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.generate import GenerationSession
from fasttfm.inference import Calibration, EmbedSettings, Session
from fasttfm.inference.formats import text_format
from fasttfm.inference.opening import (
    checkpoint_of,
    open_with_stated_head,
    with_trained_head,
)
from fasttfm.inference.sentence_folder import Normalize, SentenceFolder, read_sentence_folder
from fasttfm.models.checkpoint_files import CheckpointError
from fasttfm.models.families import FAMILIES, longest_input
from fasttfm.models.family import Head
from fasttfm.serve.texts import TextReader

# What a model computes, by its head: the names that routes ask for.
_ABILITIES = {
    Head.NONE: {"embed"},
    Head.PRETRAINING: {"embed"},
    Head.REPLACED_TOKENS: {"embed"},
    Head.MASKED_LM: {"embed", "embed_sparse", "fill_mask"},
    Head.CAUSAL_LM: {"complete"},
    Head.SEQUENCE_CLASSIFICATION: {"predict"},
    Head.TOKEN_CLASSIFICATION: {"predict", "label_tokens"},
    Head.QUESTION_ANSWERING: {"answer"},
}
_POOLING = {"cls": "first", "mean": "mean", "last-token": "last"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WARM_BATCHES = (1, 8, 64, 512)  # sequences
PRECISIONS = (*DTYPES, "int8", "fp8", "auto")


@dataclass(frozen=True)
class Source:
    """What to load.

    Args:
        directory: A checkpoint directory or hub id.
        name: The name that clients use; by default that of the directory.
        devices: One session on each.
        precision: One of ``PRECISIONS``; by default auto, and of causal models bf16 on a GPU and fp32 on a CPU.
        pooling: cls, mean or last-token instead of the folder's.
        max_batch_tokens: Tokens of a batch; the session's default if None.
        max_sequences: Sequences that a causal model continues at a time.
        max_queue: Requests in a session's queue.
    """

    directory: str
    name: str
    devices: tuple[torch.device, ...]
    precision: str | None = None
    pooling: str | None = None
    max_batch_tokens: int | None = None
    max_sequences: int = 32
    max_queue: int = 4096


class ServedModel:
    """A model, the sessions that compute it, and how its texts are read.

    Args:
        sessions: One for each device; none for a causal model.
        generations: The sessions of a causal model.
    """

    def __init__(
        self,
        source: Source,
        head: Head,
        config: Any,
        reader: TextReader,
        *,
        sessions: Sequence[Session] = (),
        generations: Sequence[GenerationSession] = (),
        pooling: Sequence[str] = (),
    ) -> None:
        self.source, self.head, self.config, self.reader = source, head, config, reader
        self.sessions, self.generations = list(sessions), list(generations)
        self.name, self.pooling = source.name, pooling
        # What computes it in a server. A request keeps them with the model, so that a reload does not change them.
        self.engine: Any = None
        self.generators: list[Any] = []
        stated = config.extra.get("id2label") or {}
        count = int(getattr(config, "num_labels", 0))
        self.labels = [str(stated.get(str(index), f"LABEL_{index}")) for index in range(count)]
        self.abilities = set(_ABILITIES[head])
        if head is Head.SEQUENCE_CLASSIFICATION and count == 1:
            self.abilities.add("rerank")

    @property
    def max_length(self) -> int:
        return self.reader.form.max_length

    @property
    def dtype(self) -> str:
        if self.sessions and self.sessions[0].precision is not None:
            return self.sessions[0].precision
        sessions: list[Any] = self.sessions or self.generations
        return str(sessions[0].dtype).removeprefix("torch.")

    @property
    def devices(self) -> list[torch.device]:
        sessions: list[Any] = self.sessions or self.generations
        return [session.device for session in sessions]

    def kind(self) -> dict[str, Any]:
        """``model_type`` of ``/info``: TEI's for the models that it has, otherwise the name of the task."""
        labels = {
            "id2label": {str(index): label for index, label in enumerate(self.labels)},
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }
        if "rerank" in self.abilities:
            return {"reranker": labels}
        if self.head is Head.SEQUENCE_CLASSIFICATION:
            return {"classifier": labels}
        if self.head is Head.TOKEN_CLASSIFICATION:
            return {"token-classification": labels}
        if self.head is Head.QUESTION_ANSWERING:
            return {"question-answering": {}}
        if self.head is Head.CAUSAL_LM:
            return {"text-generation": {}}
        pooling = {"first": "cls", "last": "last_token"}.get(self.pooling[0], self.pooling[0])
        return {"embedding": {"pooling": pooling}}

    def fault(self) -> str | None:
        """Why the model cannot compute any more; None while it can."""
        return next((session.ended for session in self.sessions if session.ended is not None), None)

    def close(self) -> None:
        """Computes what is submitted, and frees the sessions."""
        for session in self.sessions:
            session.close()


def load(source: Source) -> ServedModel:
    """Opens a model; raises CheckpointError, DataError, OSError or ValueError where it cannot be served."""
    folder = read_sentence_folder(source.directory)
    tokenizer = load_tokenizer(folder.model)
    model = open_with_stated_head(folder.model).eval().requires_grad_(False)
    heads = {kind: head for family in FAMILIES.values() for head, kind in family.models.items()}
    head = next((heads[kind] for kind in type(model).__mro__ if kind in heads), Head.NONE)
    if head not in _ABILITIES:
        expected = ", ".join(ability.value for ability in _ABILITIES)
        raise CheckpointError(f"{source.directory}: expected a model for {expected}, got one for {head.value}")
    if head is not Head.NONE:
        with_trained_head(model, source.directory, head.value)
    if head is Head.CAUSAL_LM:
        return _load_causal(source, model, tokenizer)
    settings = _settings(folder, source)
    sessions = [_session(source, folder, model, tokenizer, settings, device) for device in source.devices]
    form = text_format(model.config, tokenizer, sessions[0].max_length)
    reader = TextReader(
        tokenizer,
        form,
        prompts=folder.prompts,
        default_prompt=folder.prompt(),
        lowercase=folder.lowercase,
        fixed_prompt=not folder.pool_prompt,
    )
    pooling = settings.pooling if not isinstance(settings.pooling, str) else (settings.pooling,)
    served = ServedModel(source, head, model.config, reader, sessions=sessions, pooling=pooling)
    if settings.token_weights is not None:
        served.abilities.add("embed_sparse")
    _warm_up(served)
    return served


def _warm_up(model: ServedModel) -> None:
    """Computes batches of several sizes, so that no request waits for kernels to be compiled and tuned."""
    (tokens,) = model.reader.read(["The first request waits for no kernel."])
    output = "vectors" if "embed" in model.abilities else "logits"
    for session in model.sessions:
        for count in _WARM_BATCHES if session.device.type == "cuda" else _WARM_BATCHES[:1]:
            session.submit_sequences([tokens] * count, output=output).result()


def _settings(folder: SentenceFolder, source: Source) -> EmbedSettings:
    """Vectors before they are normalized: requests say whether they are."""
    settings = EmbedSettings.of_folder(folder)
    after = settings.after[:-1] if settings.after and isinstance(settings.after[-1], Normalize) else settings.after
    if source.pooling is None:
        return replace(settings, after=after)
    if source.pooling not in _POOLING:
        raise ValueError(f"--pooling: expected {', '.join(_POOLING)}, got {source.pooling!r}")
    return replace(settings, after=after, pooling=_POOLING[source.pooling])


def _session(
    source: Source, folder: SentenceFolder, model: Any, tokenizer: Any, settings: EmbedSettings, device: torch.device
) -> Session:
    precision = None if source.precision in DTYPES else source.precision or "auto"
    calibration = Calibration.load(checkpoint_of(folder.model)) if precision == "fp8" else None
    return Session(
        model,
        tokenizer,
        settings,
        device=device,
        dtype=DTYPES.get(source.precision or ""),
        precision=precision,
        calibration=calibration,
        max_tokens=source.max_batch_tokens,
        max_waiting=source.max_queue,
    )


def _load_causal(source: Source, model: Any, tokenizer: Any) -> ServedModel:
    if source.precision not in (None, *DTYPES):
        raise ValueError(f"--precision: expected {' or '.join(DTYPES)} for a causal model, got {source.precision!r}")
    generations = []
    for device in source.devices:
        dtype = DTYPES[source.precision or ("bfloat16" if device.type == "cuda" else "float32")]
        copy = model if len(source.devices) == 1 else open_with_stated_head(source.directory).eval()
        placed = copy.requires_grad_(False).to(device=device, dtype=dtype)
        generations.append(GenerationSession(placed, max_batch=source.max_sequences))
    form = text_format(model.config, tokenizer, longest_input(model.config))
    return ServedModel(source, Head.CAUSAL_LM, model.config, TextReader(tokenizer, form), generations=generations)


def served_name(directory: str) -> str:
    """The name of a model whose directory is given."""
    return Path(directory).resolve().name if Path(directory).exists() else directory
