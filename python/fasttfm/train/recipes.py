"""The pre-training recipes of papers, and how a small corpus scales them down.

``RECIPES`` has a table for each family. A run on a corpus that is large enough has the numbers of the paper, except for
the number of steps; a smaller one has a smaller vocabulary, shorter sequences and smaller batches (``fitted``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fasttfm.data.shard_files import shard_files
from fasttfm.data.texts import files_of
from fasttfm.train.settings import OptimizerSettings, PretrainSettings, ScheduleSettings, StepSettings

STEPS = 400  # of a run that states no number
_BYTES = 4.5  # of text per token
_COMPRESSED = 3  # the size of a text relative to a .gz or .parquet file with it
# What a corpus must have for each number of a recipe, in tokens.
_PER_ENTRY = 500  # for each entry of the vocabulary
_SEQUENCES = 20_000  # sequences of the maximum length
_STEPS_PER_EPOCH = 300
# The smallest numbers; a corpus may be smaller.
_VOCABULARY, _LENGTH, _TOKENS = 4000, 128, 2048


@dataclass(frozen=True)
class Recipe:
    """The numbers of a paper for a model of one size.

    Args:
        paper: Who published it.
        vocabulary: The size of the vocabulary.
        max_length: The maximum number of tokens in a sequence.
        batch: The number of sequences in a step.
        learning_rate: The peak of the learning rate.
        warmup: Warmup steps.
        steps, epochs: The length of the training, in one of the two.
        first_length: The maximum length in the first ``first_share`` of the steps.
        small_rate: The learning rate that is enough for small batches; larger ones have up to ``learning_rate``.
    """

    paper: str
    vocabulary: int
    max_length: int
    batch: int
    learning_rate: float
    warmup: int
    steps: int | None = None
    epochs: int | None = None
    first_length: int | None = None
    first_share: float = 0.9
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    clip: float | None = 1.0
    schedule: str = "linear"
    final: float = 0.0
    masking: float = 0.15
    whole_word: bool = False
    ngram: int = 1
    small_rate: float = 1e-4

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.max_length


def _sizes(recipe: Recipe, **changes: dict[str, Any]) -> dict[str, Recipe]:
    return {size: replace(recipe, **values) for size, values in changes.items()}


# Devlin et al., section A.2. Turc et al. (2019) train the small sizes in the same way; their rates here are our own.
_BERT = Recipe("BERT (Devlin et al., 2018)", 30_522, 512, 256, 1e-4, 10_000, steps=1_000_000, first_length=128)
_TINY = {"learning_rate": 1e-3, "small_rate": 1e-3}
_SMALL = {"learning_rate": 5e-4, "small_rate": 5e-4}
# Liu et al., table 9.
_ROBERTA = Recipe("RoBERTa (Liu et al., 2019)", 50_265, 512, 8192, 6e-4, 24_000, steps=500_000, clip=None)
_ROBERTA = replace(_ROBERTA, betas=(0.9, 0.98))
# Conneau et al., sections 3 and 4, state vocabulary, batch and steps; the other numbers are RoBERTa's.
_XLM_ROBERTA = replace(_ROBERTA, paper="XLM-RoBERTa (Conneau et al., 2019)", vocabulary=250_002, steps=1_500_000)
# Martin et al., section 4.
_CAMEMBERT = replace(_ROBERTA, paper="CamemBERT (Martin et al., 2019)", vocabulary=32_005, whole_word=True)
_CAMEMBERT = replace(_CAMEMBERT, learning_rate=7e-4, warmup=10_000, steps=100_000)
# Lan et al., sections 4.1 and A.2.
_ALBERT = Recipe("ALBERT (Lan et al., 2019)", 30_000, 512, 4096, 1.76e-3, 3125, steps=125_000, optimizer="lamb")
_ALBERT = replace(_ALBERT, whole_word=True, ngram=3)
# Clark et al., table 6.
_ELECTRA = Recipe("ELECTRA (Clark et al., 2020)", 30_522, 512, 256, 2e-4, 10_000, steps=766_000)
# Sanh et al., section 3; they do not state the learning rate, which is that of their published code.
_DISTILBERT = Recipe("DistilBERT (Sanh et al., 2019)", 30_522, 512, 4096, 5e-4, 1000, epochs=3)
# Warner et al., appendix A: the phase with sequences of 1,024 tokens.
_MODERNBERT = Recipe("ModernBERT (Warner et al., 2024)", 50_368, 1024, 4608, 8e-4, 640, steps=365_000, masking=0.3)
_MODERNBERT = replace(_MODERNBERT, betas=(0.9, 0.98), weight_decay=1e-5, schedule="constant")
# Nussbaum et al., section 4.1; the number of steps is our own.
_NOMIC_BERT = Recipe("NomicBERT (Nussbaum et al., 2024)", 30_528, 2048, 4096, 5e-4, 6000, steps=100_000, masking=0.3)
_NOMIC_BERT = replace(_NOMIC_BERT, betas=(0.9, 0.98), weight_decay=1e-5)
# Boizard et al., section 2: 5T tokens at a constant rate, before it decays.
_EUROBERT = Recipe("EuroBERT (Boizard et al., 2025)", 128_256, 2048, 2304, 1e-4, 2000, steps=1_060_000, masking=0.5)
_EUROBERT = replace(_EUROBERT, betas=(0.9, 0.95), epsilon=1e-5, weight_decay=0.1, schedule="constant")
# Radford et al., section 4.1.
_GPT = Recipe("GPT (Radford et al., 2018)", 40_478, 512, 64, 2.5e-4, 2000, epochs=100, schedule="cosine")
# Brown et al., table 2.1 and appendix B.
_GPT3 = Recipe("GPT-3 (Brown et al., 2020)", 50_257, 2048, 244, 6e-4, 750, steps=600_000, schedule="cosine", final=0.1)
_GPT3 = replace(_GPT3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
# Radford et al. (2019) state vocabulary, length and batch; the other numbers are GPT-3's for these sizes.
_GPT2 = replace(_GPT3, paper="GPT-2 (Radford et al., 2019)", max_length=1024, batch=512)

RECIPES: dict[str, dict[str, Recipe]] = {}
RECIPES["bert"] = _sizes(_BERT, tiny=_TINY, mini=_TINY, small=_SMALL, medium=_SMALL, base={}, large={})
RECIPES["roberta"] = _sizes(_ROBERTA, tiny=_TINY, base={}, large={"learning_rate": 4e-4, "warmup": 30_000})
RECIPES["xlm-roberta"] = _sizes(_XLM_ROBERTA, tiny=_TINY, base={}, large={"learning_rate": 4e-4, "warmup": 30_000})
RECIPES["camembert"] = _sizes(_CAMEMBERT, tiny=_TINY, base={}, large={})
RECIPES["albert"] = _sizes(_ALBERT, tiny={"small_rate": 1e-3}, base={}, large={}, xlarge={}, xxlarge={})
RECIPES["electra"] = _sizes(
    _ELECTRA,
    tiny={**_TINY, "max_length": 128, "batch": 128},
    small={**_SMALL, "max_length": 128, "batch": 128, "steps": 1_000_000},
    base={},
    large={"batch": 2048, "steps": 400_000, "masking": 0.25},
)
RECIPES["distilbert"] = _sizes(_DISTILBERT, tiny=_TINY, base={})
RECIPES["modernbert"] = _sizes(_MODERNBERT, tiny=_TINY, base={}, large={"batch": 4928, "learning_rate": 5e-4})
RECIPES["eurobert"] = _sizes(_EUROBERT, tiny=_TINY, **{"210m": {}, "610m": {}, "2.1b": {}})
RECIPES["nomic_bert"] = _sizes(_NOMIC_BERT, tiny=_TINY, base={})
RECIPES["gpt"] = _sizes(_GPT, tiny=_TINY, base={})
RECIPES["gpt2"] = _sizes(
    _GPT2,
    tiny=_TINY,
    small={"small_rate": 5e-4},
    medium={"learning_rate": 3e-4, "small_rate": 3e-4},
    large={"learning_rate": 2.5e-4},
    xl={"learning_rate": 2e-4},
)
RECIPES["gpt3"] = _sizes(
    _GPT3,
    tiny=_TINY,
    small={"small_rate": 5e-4},
    medium={"learning_rate": 3e-4, "small_rate": 3e-4},
    large={"learning_rate": 2.5e-4},
    xl={"learning_rate": 2e-4, "batch": 488, "warmup": 375, "steps": 300_000},
    **{
        "2.7b": {"learning_rate": 1.6e-4, "batch": 488, "warmup": 375, "steps": 300_000},
        "6.7b": {"learning_rate": 1.2e-4, "batch": 977, "warmup": 188, "steps": 150_000},
        "13b": {"learning_rate": 1e-4, "batch": 977, "warmup": 188, "steps": 150_000},
        "175b": {"learning_rate": 6e-5, "batch": 1562, "warmup": 117, "steps": 94_000},
    },
)


def estimated_tokens(source: Any) -> int:
    """About how many tokens the files of ``source`` have, by their sizes."""
    total = 0
    for path in files_of(source) or []:
        packed = path.suffix in (".gz", ".parquet")
        total += os.path.getsize(path) * (_COMPRESSED if packed else 1)
    return round(total / _BYTES)


def streamed_tokens(source: Any) -> int:
    """The same for files of ``StreamedShards``."""
    total = 0.0
    for file in shard_files(source):
        packed = file.name.endswith((".gz", ".tgz", ".parquet"))
        # Token ids mostly have two bytes.
        total += file.size / 2 if file.name.endswith(".npy") else file.size * (_COMPRESSED if packed else 1) / _BYTES
    return round(total)


def fitted(recipe: Recipe, tokens: int, fixed: Mapping[str, int], parts: int = 1) -> Recipe:
    """The recipe for a corpus of about ``tokens`` tokens.

    Args:
        fixed: The numbers that are not to be chosen: some of ``vocabulary``, ``max_length`` and ``tokens_per_step``.
        parts: The number of batches in a step, each of which has room for a sequence.
    """
    entries = max(_VOCABULARY, tokens // _PER_ENTRY // 1000 * 1000)
    vocabulary = fixed.get("vocabulary", min(recipe.vocabulary, entries))
    length = fixed.get("max_length", min(recipe.max_length, max(_LENGTH, _power_of_two(tokens // _SEQUENCES))))
    room = max(_TOKENS, _power_of_two(tokens // _STEPS_PER_EPOCH))
    size = fixed.get("tokens_per_step", min(recipe.tokens_per_step, max(length, room)))
    if "max_length" not in fixed:
        length = max(8, min(length, size // parts))
    fitting = replace(recipe, vocabulary=vocabulary, max_length=length, batch=max(1, size // length))
    if recipe.first_length is not None and ("max_length" in fixed or length <= recipe.first_length):
        fitting = replace(fitting, first_length=None)
    if size >= recipe.tokens_per_step:
        return fitting
    if recipe.optimizer == "lamb":  # an optimizer for large batches
        return replace(fitting, optimizer="adamw", learning_rate=recipe.small_rate)
    rate = recipe.learning_rate * math.sqrt(size / recipe.tokens_per_step)
    return replace(fitting, learning_rate=max(rate, min(recipe.learning_rate, recipe.small_rate)))


def _power_of_two(number: int) -> int:
    """The largest one up to ``number``."""
    return 1 << max(0, number.bit_length() - 1)


def settings_of(
    family: str, size: str, recipe: Recipe, *, steps: int, processes: int, largest: int, precision: str
) -> PretrainSettings:
    """The settings of a run with these numbers.

    Args:
        processes: The number of processes.
        largest: The maximum number of tokens in a batch; a step is divided into as many batches as that takes.
    """
    first_steps = round(recipe.first_share * steps)
    two_phases = recipe.first_length is not None and 0 < first_steps < steps
    tokens = recipe.tokens_per_step // processes
    return PretrainSettings(
        family,
        size,
        ScheduleSettings(steps, min(recipe.warmup, steps // 10), recipe.schedule, recipe.final),
        OptimizerSettings(recipe.optimizer, recipe.learning_rate, recipe.betas, recipe.epsilon, recipe.weight_decay),
        StepSettings(clip=recipe.clip, precision=precision),
        vocabulary=recipe.vocabulary,
        tokens_per_step=recipe.tokens_per_step,
        batches_per_step=processes * max(1, min(-(-tokens // largest), tokens // recipe.max_length)),
        max_length=recipe.max_length,
        first_length=recipe.first_length if two_phases else None,
        first_steps=first_steps if two_phases else None,
        masking=recipe.masking,
        whole_word=recipe.whole_word,
        ngram=recipe.ngram,
    )


def steps_of(recipe: Recipe, tokens: int) -> int:
    """The number of steps of the paper on a corpus of about ``tokens`` tokens."""
    if recipe.steps is not None:
        return recipe.steps
    assert recipe.epochs is not None
    return max(1, recipe.epochs * tokens // recipe.tokens_per_step)


def described(recipe: Recipe, settings: PretrainSettings, tokens: int) -> str:
    """The numbers of a run, next to those of the paper where they differ."""
    optimizer, schedule = settings.optimizer, settings.schedule
    rows = (
        ("vocabulary", f"{settings.vocabulary:,}", f"{recipe.vocabulary:,}"),
        ("tokens per sequence", f"{settings.max_length:,}", f"{recipe.max_length:,}"),
        (
            f"of the first {settings.first_steps or round(recipe.first_share * schedule.steps):,} steps",
            "the same" if settings.first_length is None else f"{settings.first_length:,}",
            "the same" if recipe.first_length is None else f"{recipe.first_length:,}",
        ),
        ("tokens per step", f"{settings.tokens_per_step:,}", f"{recipe.tokens_per_step:,}"),
        ("steps", f"{schedule.steps:,}", f"{steps_of(recipe, tokens):,}"),
        ("warmup steps", f"{schedule.warmup:,}", f"{recipe.warmup:,}"),
        ("optimizer", optimizer.name, recipe.optimizer),
        ("learning rate", f"{optimizer.learning_rate:g}", f"{recipe.learning_rate:g}"),
    )
    lines = [f"recipe of {recipe.paper}, on about {tokens / 1e6:,.1f} million tokens of text"]
    for name, value, paper in rows:
        if value != "the same" or paper != "the same":
            lines.append(f"  {name:30} {value:10} {'' if value == paper else f'paper: {paper}'}".rstrip())
    return "\n".join(lines)
