"""``fasttfm pretrain``: pre-trains a model on text files. The checkpoints open in transformers."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttfm.cli.options import MODEL_HELP, Formatter, exit_on_user_error, new_directory
from fasttfm.cli.pretrain_options import add_data, add_masking, add_run, add_training, configuration_field
from fasttfm.models.families import FAMILIES, objectives_of, trained_on_text

_COMPARED = ("bert", "gpt2")  # whose training step is timed against plain torch
_INIT_RATE = 5e-5  # of a model that has been trained before
_BATCHES = {"cuda": 1 << 15, "cpu": 1 << 13}  # the maximum number of tokens in a batch, unless numbers are given
_LANGUAGE = "--language: expected without --data: it selects the text that ships with the package"
_FIRST_SHARE = 0.9  # of the steps that have --first-length

# Options whose names are fields of the settings: of the whole run, of its parts, and of where it runs.
_FIELDS = (
    *(
        "objective",
        "language",
        "text_column",
        "stream",
        "window_tokens",
        "vocabulary",
        "vocabulary_kind",
        "strip_accents",
        "held_out",
        "tokens_per_step",
        "batches_per_step",
    ),
    *("max_length", "first_length", "first_steps"),
    *("masking", "mask_share", "random_share", "whole_word", "ngram", "spans", "dropout", "seed"),
)
_OPTIMIZER = {"optimizer": "name", "learning_rate": "learning_rate", "weight_decay": "weight_decay", "betas": "betas"}
_SCHEDULE = {"steps": "steps", "warmup": "warmup", "schedule": "kind", "decay": "decay"}
_STEP = {name: name for name in ("precision", "compile", "cuda_graph", "gradient_dtype", "bad_steps")}
_RUN = (
    *(
        "prepared",
        "device",
        "parallel",
        "shard_optimizer",
        "checkpoints",
        "checkpoint_every",
        "keep",
        "evaluate_every",
        "evaluation_batches",
    ),
    *("log_every", "workers"),
)

_EXAMPLES = """
examples:
  fasttfm pretrain                                        a small BERT on the text that ships with the package
  fasttfm pretrain gpt2 --data 'books/*.txt' --size small --tokens-per-step 65536 --steps 20000
  fasttfm pretrain --init bert-base-uncased --objective mlm --data papers/ --output adapted     domain adaptation
  fasttfm pretrain --init adapted --max-length 512 --data papers/ --output longer               then longer sequences
  fasttfm pretrain --stream --data 's3://texts/*.parquet' --tokenizer bert-base-uncased --output run
  fasttfm pretrain --resume --output run                  resume an interrupted run with its own settings
  torchrun --nproc-per-node 8 -m fasttfm pretrain bert --size large --parallel fsdp --data corpus/ --output run
"""


def add_parser(commands: Any) -> None:
    """Adds the ``pretrain`` command to a command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "pretrain",
        help="pre-train a model on text files",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=Formatter,
    )
    parser.add_argument(
        "model", nargs="?", choices=tuple(trained_on_text()), help="model family (default: bert, or that of --init)"
    )
    parser.add_argument("--size", help="a named size of the family, for example base (default: tiny)")
    parser.add_argument(
        "--recipe",
        choices=("fitted", "paper"),
        help="numbers of the family's paper: fitted to the size of the data, which the first lines print, or all of "
        "them as they are, also the number of steps (default: fitted)",
    )
    parser.add_argument(
        "--init",
        metavar="MODEL",
        help=f"start from this checkpoint and its tokenizer: {MODEL_HELP}",
    )
    parser.add_argument(
        "--objective",
        metavar="NAME",
        help="mlm, mlm+nsp, mlm+sop, rtd or clm (default: the family's own, or that of the --init checkpoint)",
    )
    parser.add_argument(
        "--set", nargs="+", type=configuration_field, metavar="FIELD=VALUE", help="override fields of the configuration"
    )
    add_data(parser.add_argument_group("data"))
    add_masking(parser.add_argument_group("masked tokens"))
    add_training(parser.add_argument_group("training"))
    add_run(parser.add_argument_group("run"))
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from fasttfm.train.pretrain import pretrain

    begun = time.perf_counter()
    with exit_on_user_error(arguments):
        settings, where = _settings(arguments)
        compares = _compares(arguments, settings)
        if not arguments.quiet and int(os.environ.get("RANK", 0)) == 0 and (text := _recipe(arguments, settings)):
            print(text, flush=True)
        summary = pretrain(settings, where)
        if summary is not None:
            print(_report(summary, time.perf_counter() - begun))
            if summary.learnt is not None:
                print(f"\n{summary.learnt}")
            if compares:
                print(f"\n{_step_times(summary, settings.family, where.device)}")
    return 0


def _recipe(arguments: argparse.Namespace, settings: Any) -> str | None:
    """The numbers of a new run next to those of its paper."""
    from fasttfm.train.recipes import described

    recipe = _recipe_of(settings.family, settings.size)
    if arguments.resume or recipe is None or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        return None
    return described(recipe, settings, _corpus_tokens(arguments))


def _compares(arguments: argparse.Namespace, settings: Any) -> bool:
    """Whether a step is timed against plain torch: by default where the package's own model and text are tried."""
    asked: bool | None = arguments.compare
    is_compared = settings.family in _COMPARED and settings.objective is None and settings.init is None
    if asked is None:
        return is_compared and not settings.data and not arguments.quiet
    if asked and not is_compared:
        got = settings.family if settings.family not in _COMPARED else "--objective or --init"
        raise ValueError(f"--compare: expected with {' or '.join(_COMPARED)}, got {got}")
    return asked


def _step_times(summary: Any, model: str, device: str | None) -> Any:
    import torch

    from fasttfm.cli.torch_step import compare_steps

    config: Any = FAMILIES[model].config.from_pretrained(summary.checkpoint)
    return compare_steps(config, summary.batch, torch.device(device or _default_device()))


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _settings(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from fasttfm.train.run_directory import check_restarts, read_settings, restarted
    from fasttfm.train.settings import RunSettings

    if arguments.output is not None:
        if restarted(arguments.output):
            return _restarted(arguments)
        more_steps = arguments.more_steps is not None
        check_restarts(arguments.output, more_steps=more_steps, overwrite=arguments.overwrite)
    for name in ("overwrite", "init", "recipe"):
        if arguments.resume and getattr(arguments, name):
            raise ValueError(f"--resume: expected without --{name}, which starts a new run")
    if arguments.resume and arguments.output is None:
        raise ValueError("--resume: expected --output, the folder of the run to resume")
    if arguments.more_steps is not None and not (arguments.resume and arguments.more_steps > 0):
        raise ValueError(f"--more-steps: expected a number above 0, with --resume, got {arguments.more_steps}")
    saved: dict[str, Any] = {}
    if arguments.resume:
        base, saved = read_settings(arguments.output)
        if arguments.steps not in (None, base.schedule.steps):
            expected = f"the {base.schedule.steps} steps of the run, which --more-steps extends"
            raise ValueError(f"--steps: expected with --resume {expected}, got {arguments.steps}")
        if arguments.more_steps is not None:
            more = dataclasses.replace(base.schedule, steps=base.schedule.steps + arguments.more_steps)
            base = dataclasses.replace(base, schedule=more)
    else:
        base = _new_settings(arguments)
    settings = _changed(base, arguments)
    name = f"{settings.family}-{settings.size or 'adapted'}{'-changed' if settings.changes else ''}"
    where = RunSettings(
        arguments.output or _new_directory(name),
        **{**saved, **_specified(arguments, {option: option for option in _RUN})},
        progress=not arguments.quiet,
        resume=arguments.resume,
        overwrite=arguments.overwrite,
        more_steps=arguments.more_steps is not None,
    )
    return settings, where


def _restarted(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The settings with which a run continues when torchrun restarts its processes: those of its checkpoints, if it has
    any, because the number of processes may differ."""
    from fasttfm.train.checkpoints import Checkpoints
    from fasttfm.train.run_directory import read_settings
    from fasttfm.train.settings import RunSettings

    settings, saved = read_settings(arguments.output)
    if not arguments.resume and not Checkpoints(arguments.output).steps():
        settings = _changed(_new_settings(arguments), arguments)
    options = {**saved, **_specified(arguments, {option: option for option in _RUN})}
    return settings, RunSettings(arguments.output, **options, progress=not arguments.quiet, resume=True)


def _specified(arguments: argparse.Namespace, fields: Mapping[str, str]) -> dict[str, Any]:
    """The options that are on the command line, by the names of their fields."""
    named = {field: getattr(arguments, option) for option, field in fields.items()}
    return {field: value for field, value in named.items() if value is not None}


def _new_settings(arguments: argparse.Namespace) -> Any:
    """The settings of a new run, where the command line does not say otherwise."""
    from fasttfm.train.recipes import STEPS
    from fasttfm.train.settings import OptimizerSettings, PretrainSettings, ScheduleSettings, StepSettings

    if arguments.language is not None and arguments.data:
        raise ValueError(_LANGUAGE)
    family, size, objective, init = arguments.model or "bert", arguments.size, None, None
    if arguments.init is not None:
        if size is not None:
            raise ValueError("--size: expected without --init, whose checkpoint has a size")
        for option in ("recipe", "vocabulary", "vocabulary_kind", "cased", "strip_accents"):
            if getattr(arguments, option) is not None:
                raise ValueError(f"--{option.replace('_', '-')}: expected without --init, whose tokenizer is used")
        family, objective, init = _checkpoint(arguments.init, arguments.model, arguments.objective)
    if size is None:
        size = "" if init else FAMILIES[family].default_size
    if init is None and (recipe := _recipe_of(family, size)) is not None:
        return dataclasses.replace(_of_recipe(arguments, family, size, recipe), objective=objective)
    steps = STEPS if arguments.steps is None else arguments.steps
    return PretrainSettings(
        family,
        size,
        ScheduleSettings(steps, max(0, steps // 10)),
        OptimizerSettings(learning_rate=_INIT_RATE if init else 1e-4),
        StepSettings(precision="bfloat16" if _on_gpu(arguments) else "float32"),
        init=init,
        objective=objective,
    )


def _of_recipe(arguments: argparse.Namespace, family: str, size: str, recipe: Any) -> Any:
    """The settings of a recipe, fitted to the data unless it is pinned."""
    from fasttfm.train.recipes import STEPS, fitted, settings_of, steps_of

    tokens, pinned = _corpus_tokens(arguments), arguments.recipe == "paper"
    processes = int(os.environ.get("WORLD_SIZE", 1))
    sizes = _specified(arguments, {name: name for name in ("vocabulary", "max_length", "tokens_per_step")})
    sizes = {name: value for name, value in sizes.items() if value > 0}  # the settings refuse the others
    parts = max(1, arguments.batches_per_step or processes * (arguments.accumulation or 1))
    chosen = recipe if pinned else fitted(recipe, tokens, sizes, parts)
    steps = arguments.steps
    if steps is None:
        steps = steps_of(recipe, tokens) if pinned else STEPS
    if arguments.cuda_graph or "max_length" in sizes:
        chosen = dataclasses.replace(chosen, first_length=None)
    if arguments.spans:
        chosen = dataclasses.replace(chosen, ngram=1)
    on_gpu = _on_gpu(arguments)
    return settings_of(
        family,
        size,
        chosen,
        steps=steps,
        processes=processes,
        largest=recipe.tokens_per_step if "tokens_per_step" in sizes else _BATCHES["cuda" if on_gpu else "cpu"],
        precision="bfloat16" if on_gpu else "float32",
    )


def _recipe_of(family: str, size: str) -> Any:
    """The recipe of the paper; None for families and sizes without one."""
    from fasttfm.train.recipes import RECIPES

    return RECIPES.get(family, {}).get(size)


def _corpus_tokens(arguments: argparse.Namespace) -> int:
    from fasttfm.data import shipped_corpus
    from fasttfm.train.recipes import estimated_tokens, streamed_tokens

    if arguments.stream and arguments.data:
        return streamed_tokens(arguments.data)
    return estimated_tokens(arguments.data or shipped_corpus(arguments.language or "english"))


def _on_gpu(arguments: argparse.Namespace) -> bool:
    return bool((arguments.device or _default_device()).startswith("cuda"))


def _checkpoint(name: str, family: str | None, asked: str | None) -> tuple[str, str | None, str]:
    """The family of a checkpoint, what it is made to predict (None: what its family predicts), and its directory: of a
    run that of its newest checkpoint, of ELECTRA the one with both models. ``asked`` is the objective that is given."""
    from fasttfm.inference.opening import family_of
    from fasttfm.models.checkpoint_files import CONFIG, read_json
    from fasttfm.models.directories import checkpoint_directory

    folder = checkpoint_directory(name)
    both = (folder / "discriminator").is_dir() and not (folder / CONFIG).is_file()
    config = folder / "discriminator" if both else folder
    found_family = family_of(config)
    if family is not None and found_family.name != family:
        raise ValueError(f"--init: expected a checkpoint of {family}, got one of {found_family.name} in {folder}")
    known = objectives_of(found_family)
    made = {
        found_family.models[objective_class.head].__name__: name for name, objective_class in reversed(known.items())
    }  # the family's own first
    stated = read_json(config / CONFIG).get("architectures") or []
    objective = next((made[name] for name in stated if name in made), None)
    if both:
        objective = "rtd"
    elif objective is None and found_family.name == "electra":
        if asked != "mlm":
            got = f"{folder} with one model; --objective mlm trains one as a generator"
            raise ValueError(f"--init: expected a folder with ELECTRA's 'generator' and 'discriminator', got {got}")
    elif objective is None:  # a model without a head for its family's own objective
        objective = "clm" if found_family.causal else "mlm"
    return found_family.name, None if objective == next(iter(known), None) else objective, os.path.abspath(folder)


def _changed(base: Any, arguments: argparse.Namespace) -> Any:
    """The settings with what the command line states."""
    from fasttfm.train.settings import at_least

    changes = _specified(arguments, {name: name for name in _FIELDS})
    if arguments.accumulation is not None:
        if arguments.batches_per_step is not None:
            raise ValueError("--accumulation: expected without --batches-per-step, which says it for all processes")
        at_least("accumulation", arguments.accumulation, 1)
        changes["batches_per_step"] = arguments.accumulation * int(os.environ.get("WORLD_SIZE", 1))
    if "first_length" in changes and changes.get("first_steps", base.first_steps) is None:
        changes["first_steps"] = round(_FIRST_SHARE * (arguments.steps or base.schedule.steps))
    parts = {"optimizer": _OPTIMIZER, "schedule": _SCHEDULE, "step": _STEP}
    for part, fields in parts.items():
        changed = _specified(arguments, fields)
        changed |= {"betas": tuple(changed["betas"])} if "betas" in changed else {}
        changed |= {"clip": arguments.clip or None} if part == "step" and arguments.clip is not None else {}
        changes[part] = dataclasses.replace(getattr(base, part), **changed)
    if arguments.model is not None:
        changes["family"] = arguments.model
    if arguments.size is not None:
        changes["size"] = arguments.size
    if arguments.cased:
        changes["lowercase"] = False
    if arguments.set is not None:
        changes["changes"] = dict(arguments.set)
    if arguments.data is not None:
        changes["data"] = tuple(source if "://" in source else os.path.abspath(source) for source in arguments.data)
    if arguments.tokenizer is not None:
        is_path = os.path.exists(arguments.tokenizer)  # or else a model of the hub
        changes["tokenizer"] = os.path.abspath(arguments.tokenizer) if is_path else arguments.tokenizer
    if arguments.language is not None and (arguments.data or base.data):
        raise ValueError(_LANGUAGE)
    return dataclasses.replace(base, **changes)


def _new_directory(name: str) -> Path:
    """A new one. All processes of a run must find the same: under torchrun --output is needed."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--output: expected under torchrun")
    return new_directory(name)


def _report(summary: Any, seconds: float) -> str:
    from fasttfm.train.curves import CURVES
    from fasttfm.train.logs import CSV

    held_out = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in summary.held_out.items())
    skipped = f"; {summary.skipped} were skipped, their loss or gradient was not finite" if summary.skipped else ""
    rate = "" if summary.tokens_per_second is None else f"; {summary.tokens_per_second:,.0f} tokens/s after warmup"
    return (
        f"{summary.steps} steps, {summary.tokens:,} tokens in {seconds:.0f} s{skipped}{rate}\n"
        f"training loss {summary.loss_sum}\n"
        f"validation: {held_out}{_perplexity(summary)}\n"
        f"checkpoint  {summary.checkpoint}\n"
        f"log         {summary.directory / CSV}\n"
        f"curves      {summary.directory / CURVES}"
    )


def _perplexity(summary: Any) -> str:
    from fasttfm.train.logs import perplexity

    losses = [value for name, value in summary.held_out.items() if name in ("masked_lm", "causal_lm")]
    return f", perplexity {perplexity(losses[0]):,.1f}" if losses else ""
