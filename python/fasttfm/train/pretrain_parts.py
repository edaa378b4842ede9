"""The corpus, the objective and the initial model of a pre-training run."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fasttfm import data
from fasttfm._atomic_files import first_line
from fasttfm.models.checkpoint_files import SHARDS
from fasttfm.models.directories import PARTS, checkpoint_directory
from fasttfm.models.families import FAMILIES, TextObjective, objectives_of, trained_on_text
from fasttfm.models.hub import Part
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.train.run_directory import RunError
from fasttfm.train.settings import PretrainSettings, RunSettings, one_of


@dataclass(frozen=True)
class Corpus:
    tokenizer: data.Tokenizer
    training: data.TokenShards | data.StreamedShards
    held_out: data.TokenShards | data.StreamedShards

    def __str__(self) -> str:
        if isinstance(self.training, data.StreamedShards) or isinstance(self.held_out, data.StreamedShards):
            files = self.training.files if isinstance(self.training, data.StreamedShards) else ()
            return f"{len(files):,} files, {sum(file.size for file in files) / 1e6:,.1f} MB, read while training"
        return (
            f"{self.training.documents:,} documents, {self.training.tokens / 1e6:.2f} million tokens, "
            f"{self.held_out.documents:,} documents for validation"
        )


def open_corpus(settings: PretrainSettings, run: RunSettings, trained: Path, *, load: bool) -> Corpus:
    """Opens the tokenizer and the shards, and prepares them if necessary.

    Args:
        trained: The run's folder for a tokenizer that is trained on the data, or for that of ``settings.init``.
        load: Whether this folder already has the tokenizer.
    """
    source: Any = list(settings.data) or data.shipped_corpus(settings.language)
    tokenizer = _tokenizer(settings, source, trained, load=load)
    if settings.stream:
        streamed = data.StreamedShards.open(source, tokenizer, column=settings.text_column)
        return Corpus(tokenizer, *streamed.split(settings.held_out))
    shards = data.prepare(
        source,
        tokenizer,
        run.prepared or run.output / "shards",
        progress=run.progress and sys.stderr.isatty(),
        column=settings.text_column,
    )
    if shards.tokens < settings.tokens_per_step or shards.documents < 2:
        raise RunError(
            f"the data are too small: {shards.tokens} tokens in {shards.documents} documents, where a step takes "
            f"{settings.tokens_per_step} tokens and evaluation at least one document of its own"
        )
    return Corpus(tokenizer, *shards.split(settings.held_out))


def _tokenizer(settings: PretrainSettings, source: Any, trained: Path, *, load: bool) -> data.Tokenizer:
    """The tokenizer of the settings, or one that is trained on the data; arguments of ``open_corpus``."""
    if settings.tokenizer is not None:
        return data.load_tokenizer(settings.tokenizer)
    if load:
        return data.load_tokenizer(trained)
    if settings.init is not None:
        data.load_tokenizer(settings.init).save(trained)
        return data.load_tokenizer(trained)  # read again, as in a resumed run
    family_kind: Any = FAMILIES[settings.family].tokenizer
    kind: Any = settings.vocabulary_kind or family_kind
    tokenizer = data.train_tokenizer(
        kind,
        data.read_documents(source, column=settings.text_column),
        settings.vocabulary,
        lowercase=settings.lowercase,
        strip_accents=settings.strip_accents,
        special="bert" if family_kind == "wordpiece" else "roberta",
    )
    tokenizer.save(trained, model_max_length=longest_sequence(settings))
    return tokenizer


def objective(settings: PretrainSettings) -> TextObjective:
    """The objective of the settings, or else the family's own."""
    family = FAMILIES[settings.family]
    known = objectives_of(family)
    if settings.objective is None:
        return next(iter(known.values()))
    if settings.objective not in known:
        raise ValueError(f"objective: expected {' or '.join(known)} for {family.title}, got {settings.objective!r}")
    return known[settings.objective]


def masking(settings: PretrainSettings) -> data.Masking | None:
    """The masking of tokens; None for causal models."""
    chosen = objective(settings)
    if chosen.sequences == "causal":
        return None
    # ELECTRA's generator reads [MASK] for every predicted token.
    shares = (1.0, 0.0) if chosen.module.name == "rtd" else (0.8, 0.1)
    stated = (settings.mask_share, settings.random_share)
    mask_share, random_share = (
        default if share is None else share for share, default in zip(stated, shares, strict=True)
    )
    if settings.random_share is None:
        random_share = min(random_share, 1 - mask_share)
    ngram = settings.ngram if settings.ngram > 1 or not settings.spans else 10  # SpanBERT's longest
    return data.Masking(
        settings.masking, settings.whole_word or settings.spans, ngram, mask_share, random_share, spans=settings.spans
    )


# ---- phases ----------------------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """Steps with sequences of one maximum length."""

    until: int  # the number of completed steps at its end
    max_length: int
    tokens: int  # the maximum number of tokens in a batch of one process


def phases(settings: PretrainSettings, parts: int) -> list[Phase]:
    """The phases of a run, whose steps have ``parts`` batches over all ranks."""
    tokens = settings.tokens_per_step // parts
    if tokens < settings.max_length:
        raise RunError(
            f"tokens per step: {settings.tokens_per_step} in {parts} batches (over all processes) are "
            f"{tokens} each, fewer than one sequence of {settings.max_length}"
        )
    last = Phase(settings.schedule.steps, settings.max_length, tokens)
    if settings.first_length is None or settings.first_steps is None:
        return [last]
    first = settings.first_length
    return [Phase(settings.first_steps, first, tokens * first // settings.max_length), last]


# ---- the model -------------------------------------------------------------------------------------------------------


def check_model(settings: PretrainSettings) -> None:
    """Raises ValueError if the settings describe no valid model, for any vocabulary."""
    known = FAMILIES.get(settings.family)
    if known is not None and not known.trains_on_text:
        raise ValueError(f"model: {known.title} has no pre-training objective on text")
    one_of("model", settings.family, tuple(trained_on_text()))
    family = FAMILIES[settings.family]
    objective(settings)
    masking(settings)
    if settings.vocabulary_kind is not None:
        one_of("vocabulary_kind", settings.vocabulary_kind, data.tokenizer_training.KINDS)
    if settings.init is None:
        one_of(f"size of {settings.family}", settings.size, family.sizes)
    config = _config(settings)
    longest = getattr(config, family.positions) - family.unused_positions
    if settings.max_length > longest:
        raise ValueError(
            f"max_length: expected up to {longest}, for which {settings.init} has positions, got {settings.max_length}"
        )
    try:
        blank_model(settings)
    except RuntimeError as error:
        raise ValueError(
            f"{settings.family}: expected sizes of a model that torch can make: {first_line(error)}"
        ) from error


def blank_model(settings: PretrainSettings) -> PretrainedModel:
    """The model without memory for its parameters; its vocabulary is that of a tokenizer that is trained, or else the
    configuration's."""
    config = _config(settings)
    if settings.init is None and settings.tokenizer is None and "vocab_size" not in settings.changes:
        config.vocab_size = settings.vocabulary
    with torch.device("meta"):
        return FAMILIES[settings.family].models[objective(settings).head](config)


def longest_sequence(settings: PretrainSettings) -> int:
    """The number of tokens that the model has positions for."""
    family = FAMILIES[settings.family]
    return int(getattr(_config(settings), family.positions)) - family.unused_positions


def _changes(settings: PretrainSettings) -> dict[str, Any]:
    """Fields of the configuration that the settings change."""
    config_class = FAMILIES[settings.family].config
    names = vars(config_class())
    for name in settings.changes:
        if name not in names or name == "extra":
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else f": {', '.join(sorted(set(names) - {'extra'}))}"
            raise ValueError(f"{name}: expected a field of {config_class.__name__}{hint}")
    dropout = {} if settings.dropout is None else {name: settings.dropout for name in names if _is_dropout(name)}
    return {**dropout, **settings.changes}


def _is_dropout(name: str) -> bool:
    return name in ("dropout", "attention_dropout", "embedding_dropout", "mlp_dropout") or name.endswith(
        ("_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob")
    )


def _config(settings: PretrainSettings) -> Any:
    family, changes = FAMILIES[settings.family], _changes(settings)
    config: Any
    if settings.init is not None:
        folder = checkpoint_directory(settings.init, Part.CONFIG)
        part = folder / PARTS[0]
        config = family.config.from_pretrained(part if part.is_dir() else folder)
    else:
        config = family.config.named(settings.size)
        longest = getattr(config, family.positions)
        setattr(config, family.positions, max(longest, settings.max_length + family.unused_positions))
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def make_model(settings: PretrainSettings, tokenizer: data.Tokenizer) -> PretrainedModel:
    """The model of the checkpoint ``settings.init``, or one that is randomly initialized with ``settings.seed``."""
    family, config = FAMILIES[settings.family], _config(settings)
    model_cls = family.models[objective(settings).head]
    if settings.init is None and "vocab_size" not in settings.changes:
        config.vocab_size = tokenizer.vocab_size
    elif config.vocab_size < tokenizer.vocab_size:
        got = f"{config.vocab_size}, where the tokenizer has {tokenizer.vocab_size} entries"
        raise ValueError(f"vocab_size: expected no fewer than the tokenizer's, got {got}")
    torch.manual_seed(settings.seed)
    if settings.init is not None and (Path(settings.init) / SHARDS).is_dir():  # a resumed run's, which is read later
        folders = [folder for name in PARTS if (folder := Path(settings.init) / name).is_dir()]  # ELECTRA's two
        return model_cls(*map(family.config.from_pretrained, folders or [Path(settings.init)]))
    if settings.init is not None:
        return model_cls.from_pretrained(settings.init, dtype=torch.float32, **_changes(settings))
    if "pad_token_id" not in settings.changes:
        config.pad_token_id = tokenizer.special.pad
    if family.causal:
        config.bos_token_id, config.eos_token_id = tokenizer.special.bos, tokenizer.special.eos
    return model_cls(config)
