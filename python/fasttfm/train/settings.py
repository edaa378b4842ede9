"""The settings of a training run, as dataclasses: the command line fills them, checkpoints store them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttfm.data.texts import LANGUAGES

OPTIMIZERS = ("adamw", "lamb", "muon")
SCHEDULES = ("linear", "cosine", "constant", "wsd")
PRECISIONS = ("float32", "bfloat16", "fp8")
GRADIENT_DTYPES = ("float32", "bfloat16")
CHECKPOINTS = ("whole", "sharded")


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer's settings. Biases and LayerNorms have no weight decay."""

    name: str = "adamw"
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        one_of("optimizer", self.name, OPTIMIZERS)
        at_least("learning_rate", self.learning_rate, 0)
        at_least("weight_decay", self.weight_decay, 0)
        at_least("epsilon", self.epsilon, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {self.betas}")


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate schedule: a warmup over ``warmup`` steps, then a decay to the fraction ``final`` after
    ``steps``. With ``wsd`` (warmup, stable, decay) the rate is constant until the last ``decay`` steps, in which it
    decays linearly."""

    steps: int
    warmup: int = 0
    kind: str = "linear"
    final: float = 0.0
    decay: int | None = None  # of wsd; by default a fifth of the steps

    def __post_init__(self) -> None:
        one_of("schedule", self.kind, SCHEDULES)
        at_least("steps", self.steps, 1)
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup: expected a number of steps from 0 to all {self.steps}, got {self.warmup}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final: expected a fraction of the learning rate in [0, 1], got {self.final}")
        if self.decay is not None and self.kind != "wsd":
            raise ValueError(f"decay: expected with the schedule wsd, got {self.kind}")
        if self.decay is not None and not 0 <= self.decay <= self.steps - self.warmup:
            most = self.steps - self.warmup
            raise ValueError(f"decay: expected a number of steps from 0 to the {most} after warmup, got {self.decay}")


@dataclass(frozen=True)
class StepSettings:
    """The settings of one step."""

    clip: float | None = 1.0  # max gradient norm; None disables clipping
    precision: str = "float32"  # of GEMMs; parameters and optimizer are fp32; fp8 is nn.Fp8Training with bf16 autocast
    compile: bool = False  # whether the forward is compiled with torch.compile
    cuda_graph: bool = False  # whether CUDA graphs run the whole step: batches must have fixed shapes
    gradient_dtype: str = "float32"  # in which ranks send their gradients to each other
    bad_steps: int = 5  # the run ends after this many consecutive steps with a non-finite loss or gradient

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        one_of("gradient_dtype", self.gradient_dtype, GRADIENT_DTYPES)
        at_least("bad_steps", self.bad_steps, 1)
        if self.precision == "fp8" and self.compile:
            raise ValueError(
                "precision: fp8 expects compile=False: each of its layers is already one autograd function"
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip: expected a max gradient norm above 0 or None, got {self.clip}")


@dataclass(frozen=True)
class PretrainSettings:
    """The settings that determine the result of a pre-training run; a resumed run must have the same ones."""

    family: str
    size: str  # empty with ``init``
    schedule: ScheduleSettings
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    step: StepSettings = field(default_factory=StepSettings)
    init: str | None = None  # a checkpoint directory to start from; by default parameters are randomly initialized
    objective: str | None = None  # one of ``families.objectives_of``; the family's own by default
    data: tuple[str, ...] = ()  # files, folders or patterns; the corpus that ships with the package by default
    language: str = "english"  # of the corpus that ships with the package
    text_column: str = "text"  # of files with columns
    stream: bool = False  # whether ``data`` are read while the model trains, by addresses of fsspec
    window_tokens: int = 1 << 22  # of a stream: sequences are shuffled within about this many tokens
    tokenizer: str | None = None  # a file or folder; by default that of ``init``, or one is trained on the data
    vocabulary: int = 4000  # maximum number of entries of a trained tokenizer
    vocabulary_kind: str | None = None  # of a trained tokenizer; the family's own by default
    lowercase: bool = True  # a trained WordPiece or Unigram tokenizer
    strip_accents: bool = False  # the same
    held_out: float = 0.02  # the fraction of the documents in the validation set
    tokens_per_step: int = 2048  # over all batches of a step
    batches_per_step: int | None = None  # over all ranks, which share them out; by default one for each rank
    max_length: int = 128  # the maximum number of tokens in a sequence
    first_length: int | None = None  # a smaller maximum in the first steps (BERT), with as many sequences per step
    first_steps: int | None = None  # the number of these steps; with ``first_length``
    masking: float = 0.15  # the fraction of tokens that masked LM predicts
    mask_share: float | None = None  # the fraction of these that [MASK] replaces; 0.8 by default, 1 for ELECTRA
    random_share: float | None = None  # the fraction that a random token replaces; 0.1 by default, 0 for ELECTRA
    whole_word: bool = False
    ngram: int = 1
    spans: bool = False
    dropout: float | None = None  # that of the size by default
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the configuration to override
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "max_length", "ngram", "vocabulary", "window_tokens"):
            at_least(name, getattr(self, name), 1)
        if self.batches_per_step is not None:
            at_least("batches_per_step", self.batches_per_step, 1)
        self._check_phases()
        if self.stream and not self.data:
            raise ValueError("stream: expected data, the addresses of files, got none")
        if self.stream and self.tokenizer is None and self.init is None:
            raise ValueError("stream: expected tokenizer or init: no tokenizer is trained on a stream")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out: expected the validation set's fraction, between 0 and 1, got {self.held_out}")
        if not 0 < self.masking <= 1:
            raise ValueError(f"masking: expected a fraction of the tokens above 0 and up to 1, got {self.masking}")
        for name in ("mask_share", "random_share"):
            if (share := getattr(self, name)) is not None and not 0 <= share <= 1:
                raise ValueError(f"{name}: expected a share of the predicted tokens in [0, 1], got {share}")
        random_seed(self.seed)
        one_of("language", self.language, tuple(LANGUAGES))
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected a number in [0, 1), got {self.dropout}")

    def _check_phases(self) -> None:
        if (self.first_length is None) != (self.first_steps is None):
            raise ValueError("first_length: expected together with first_steps, the number of steps with this length")
        if self.first_length is None or self.first_steps is None:
            return
        if not 1 <= self.first_length < self.max_length:
            got = f"{self.first_length} with a max_length of {self.max_length}"
            raise ValueError(f"first_length: expected a length below max_length, got {got}")
        if not 0 < self.first_steps < self.schedule.steps:
            got = f"{self.first_steps} of {self.schedule.steps}"
            raise ValueError(f"first_steps: expected a number of steps above 0 and below all steps, got {got}")
        if self.step.cuda_graph:
            raise ValueError("first_length: expected without cuda_graph, whose step has one shape")


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that do not change its result: device, output, logging."""

    output: Path
    prepared: Path | None = None  # token shards; in the output folder by default
    device: str | None = None
    parallel: str | None = None
    shard_optimizer: bool = False  # whether the ranks of DDP divide the optimizer's state
    resume: bool = False
    overwrite: bool = False
    checkpoint_every: int | None = None  # steps; by default five times per run, or every 1,000 steps
    keep: int = 3
    checkpoints: str = "whole"  # or sharded: every process writes its part, in the background
    evaluate_every: int | None = None  # steps; by default ten times per run
    evaluation_batches: int = 8  # over all ranks
    log_every: int = 10
    workers: int | None = None  # processes that prepare batches; by default 2 with a GPU, none on a CPU
    progress: bool = True
    more_steps: bool = False  # whether a resumed run may have more steps than before

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "keep", "evaluate_every", "evaluation_batches", "log_every"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1)
        one_of("checkpoints", self.checkpoints, CHECKPOINTS)
        if self.workers is not None:
            at_least("workers", self.workers, 0)


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise ValueError(f"{name}: expected a number from {least} on, got {value}")


def random_seed(value: int) -> None:
    if not 0 <= value < 1 << 63:
        raise ValueError(f"seed: expected a random seed from 0 to 2**63 - 1, got {value}")
