"""``fasttfm pretrain-knowledge``: pre-trains ERNIE (of Tsinghua University) on texts with aligned entities.

  fasttfm transe --output kg --width 32
  fasttfm pretrain-knowledge --entities kg --steps 300 --output ernie
  fasttfm finetune --task relation --model ernie

Losses: masked LM, next sentence, and the denoising entity auto-encoder. The data are texts of two sentences or more:
plain text (.txt, blank lines between texts), in which names of entities are found, the longest first; or lines with
stated mentions, {{"text": "...", "entities": [{{"start": 0, "end": 4, "entity": "Ahab"}}]}}. --names adds other names
of the entities, a line each: name, tab, entity. Mentions of entities that the graph does not have are read as plain
words. The output directory holds the model with its entities, its tokenizer, log.csv, curves.png and metrics.json.
--resume continues an interrupted run.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import write_json
from fasttfm.cli.options import (
    MODEL_HELP,
    Formatter,
    add_run_options,
    add_training_options,
    check_resumed_output,
    device_of,
    draw_curves,
    exit_on_user_error,
    facts_of,
    output_of,
    precision_of,
    sentence,
)
from fasttfm.models.ernie_knowledge import FAMILY


def add_parser(subparsers: Any) -> None:
    """Adds the ``pretrain-knowledge`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "pretrain-knowledge",
        help="pre-train ERNIE on texts with entities of a knowledge graph",
        description=str(__doc__).format(),
        formatter_class=Formatter,
    )
    parser.add_argument(
        "--entities", type=Path, required=True, metavar="DIR", help="entity vectors, written by fasttfm transe"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="plain text or texts with mentions (default: the shipped texts)"
    )
    parser.add_argument("--names", type=Path, metavar="FILE", help="other names of the entities: name, tab, entity")
    parser.add_argument(
        "--init",
        metavar="MODEL",
        help=f"start from this BERT or ERNIE: {MODEL_HELP} (default: random initialization)",
    )
    parser.add_argument(
        "--size", choices=FAMILY.sizes, default=FAMILY.default_size, help="size of the model without --init"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer (default: that of --init, or one trained on the data)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=4000, metavar="N", help="vocabulary size of a trained tokenizer"
    )
    group = add_training_options(parser, rate=5e-4, about_rate="peak learning rate")
    group.add_argument("--steps", type=int, default=300, metavar="N", help="optimizer steps")
    group.add_argument("--tokens-per-step", type=int, default=2048, metavar="N", help="tokens per optimizer step")
    group.add_argument("--max-length", type=int, default=128, metavar="N", help="max tokens per sequence")
    group = add_run_options(parser)
    group.add_argument(
        "--resume", action="store_true", help="continue the interrupted run in --output, with the same options"
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help="checkpoint interval (default: a fifth of the run, at most 1000); interrupted runs write one too",
    )
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    with exit_on_user_error(arguments):
        from fasttfm.data.knowledge import check_known, read_mentions
        from fasttfm.data.texts import shipped_knowledge
        from fasttfm.models.entity_files import read_entities
        from fasttfm.train import OptimizerSettings, ScheduleSettings, StepSettings
        from fasttfm.train.knowledge import KnowledgeSettings, pretrain_knowledge
        from fasttfm.train.step_checkpoints import StepCheckpoints

        check_resumed_output(arguments, entities=arguments.entities, init=arguments.init)
        device = device_of(arguments)
        settings = KnowledgeSettings(
            ScheduleSettings(arguments.steps, warmup=round(arguments.warmup_share * arguments.steps)),
            OptimizerSettings(learning_rate=arguments.learning_rate, weight_decay=arguments.weight_decay),
            StepSettings(clip=arguments.clip or None, precision=precision_of(arguments, device)),
            tokens_per_step=arguments.tokens_per_step,
            accumulation=arguments.accumulation,
            max_length=arguments.max_length,
            seed=arguments.seed,
        )
        names, vectors = read_entities(arguments.entities)
        source = arguments.data or shipped_knowledge("mentions")
        examples = read_mentions(source, _linker(arguments.names, names).link)
        check_known(examples, names, str(source))
        known = set(names)
        mentions = [sum(span.entity in known for span in example.entities) for example in examples]
        if not arguments.quiet:
            print(
                f"{len(examples):,} texts, {sum(map(bool, mentions)):,} with mentions of entities,"
                f" {sum(mentions):,} mentions"
            )
        tokenizer = _tokenizer(arguments, examples)
        model = _model(arguments, tokenizer, vectors.shape[1])
        model.set_entities(names, vectors)
        output = output_of(arguments, "pretrain-knowledge")

        def save(directory: Path) -> None:
            model.save_pretrained(directory)
            tokenizer.save(directory, model_max_length=model.config.max_position_embeddings, config=model.config)

        def save_checkpoint(directory: Path) -> None:
            log.write()  # so that a resumed run has all rows up to here
            save(directory)

        checkpoints = StepCheckpoints(
            output,
            {**facts_of(arguments), "tokenizer": tokenizer.fingerprint, "texts": len(examples)},
            save_checkpoint,
            resume=arguments.resume,
            every=arguments.checkpoint_every,
        )
        with _log(arguments, output, checkpoints.start) as log:
            losses = pretrain_knowledge(
                model.to(device), tokenizer, examples, settings, on_results=log.add, checkpoints=checkpoints
            )
        draw_curves(log.path, f"{FAMILY.title}, {settings.tokens_per_step:,} tokens per step")
        save(output)
        write_json(output / "metrics.json", {"data": str(source), "steps": arguments.steps, "validation": losses})
        checkpoints.remove()
        print(f"validation {sentence(losses)}")
        print(f"output     {output}")
    return 0


def _linker(table: Path | None, entities: Sequence[str]) -> Any:
    """A linker of the entities by their own names and those of a table."""
    from fasttfm.data.entity_linking import EntityLinker, read_entity_names
    from fasttfm.data.lines import data_error

    names = {} if table is None else read_entity_names(table)
    if table is not None and set(names.values()).isdisjoint(entities):
        raise data_error(table, f"names of the {len(entities)} entities of the graph", repr(next(iter(names.values()))))
    return EntityLinker({**{name: name for name in entities}, **names})


def _tokenizer(arguments: argparse.Namespace, examples: Any) -> Any:
    from fasttfm import data

    if arguments.tokenizer or arguments.init:
        return data.load_tokenizer(arguments.tokenizer or arguments.init)
    return data.train_tokenizer("wordpiece", (example.text for example in examples), arguments.vocabulary)


def _model(arguments: argparse.Namespace, tokenizer: Any, width: int) -> Any:
    """The checkpoint ``--init``, or a model of ``--size`` with drawn parameters."""
    import torch

    from fasttfm.inference.opening import family_of
    from fasttfm.models import ErnieKnowledgeConfig, ErnieKnowledgeForPreTraining

    torch.manual_seed(arguments.seed)
    if arguments.init is None:
        config = ErnieKnowledgeConfig.named(arguments.size, vocab_size=tokenizer.vocab_size)
        config.entity_embedding_size, config.pad_token_id = width, tokenizer.special.pad
        return ErnieKnowledgeForPreTraining(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heads that are new
        if family_of(arguments.init) is FAMILY:
            return ErnieKnowledgeForPreTraining.from_pretrained(arguments.init)
        return ErnieKnowledgeForPreTraining.from_bert(arguments.init, entity_embedding_size=width)


def _log(arguments: argparse.Namespace, output: Path, start: int) -> Any:
    import contextlib

    from fasttfm.models.ernie_knowledge import KnowledgePretraining
    from fasttfm.train.logs import RunLog
    from fasttfm.train.progress import Progress

    progress = None if arguments.quiet else Progress(arguments.steps, start=start)
    log = RunLog(output, KnowledgePretraining.terms, steps=arguments.steps, start=start, progress=progress)

    @contextlib.contextmanager
    def closing() -> Any:
        try:
            yield log
        finally:
            log.close()
            if progress is not None:
                progress.close()

    return closing()
