"""``pretrain``: pre-trains a model on text files: data, training loop, evaluation, checkpoints and logs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm import data
from fasttfm._atomic_files import first_line
from fasttfm.models.checkpoint_files import CONFIG, SHARDS
from fasttfm.models.objectives import CausalLM, MaskedLM
from fasttfm.train import checkpoints as files
from fasttfm.train import sharded_checkpoints
from fasttfm.train.checkpoints import Checkpoints, ModelFiles
from fasttfm.train.curves import CURVES, write_curves
from fasttfm.train.distributed import World, join, share_out
from fasttfm.train.fixed_shapes import Shape, filled
from fasttfm.train.learnt import Learnt, learnt
from fasttfm.train.logs import EVENTS, RunLog
from fasttfm.train.loop import Objective, Trainer, check_finite
from fasttfm.train.memory import check_memory
from fasttfm.train.optimizers import make_optimizer
from fasttfm.train.pretrain_parts import (
    Corpus,
    Phase,
    check_model,
    longest_sequence,
    make_model,
    masking,
    objective,
    open_corpus,
    phases,
)
from fasttfm.train.progress import Progress, peak_flops
from fasttfm.train.run_directory import SETTINGS, RunError, not_a_run, read_settings, run_lock, write_settings
from fasttfm.train.schedule import Schedule
from fasttfm.train.settings import PretrainSettings, RunSettings
from fasttfm.train.sharded_checkpoints import ShardedCheckpoints
from fasttfm.train.stopping import Stop

_TOKENIZER, _NEW_TOKENIZER = "tokenizer", "tokenizer.new"
_VALIDATION_WINDOW = 8  # batches in a window of a streamed validation set
_Stream = data.BatchStream | data.ShardStream
# The files of a run that has not started.
_LEFT = re.compile(r"\.lock|settings\.json|tokenizer|tokenizer\.new|shards|.*\.partial")


@dataclass(frozen=True)
class Summary:
    """The results of a run."""

    directory: Path
    checkpoint: Path
    steps: int
    tokens: int
    skipped: int
    loss: float  # of the last row
    loss_sum: str  # the same as the sum of its terms with their weights
    held_out: dict[str, float]
    tokens_per_second: float | None  # without the first steps
    batch: data.Batch  # of the validation set
    learnt: Learnt | None = None  # of models that predict words, in one process


def pretrain(settings: PretrainSettings, run: RunSettings) -> Summary | None:
    """Pre-trains a model and returns its results in the main process, None in others."""
    check_model(model_source(settings, run))
    world = join(run.device, run.parallel)
    shards = world.size if world.parallel == "fsdp" else 1
    if run.shard_optimizer and world.parallel != "ddp":
        got = "one process" if world.parallel is None else f"{world.parallel}, which shards it"
        raise ValueError(f"shard_optimizer: expected several processes with ddp, got {got}")
    split = {"shards": shards, "optimizer_shards": world.size if run.shard_optimizer else shards}
    check_memory(model_source(settings, run), world.device, processes=world.size, **split)
    if settings.step.cuda_graph and (world.device.type != "cuda" or world.size > 1):
        raise ValueError("cuda_graph: expected one process with a GPU")
    try:
        with contextlib.ExitStack() as held:
            summary = _Run(settings, run, world, held).train()
    except RuntimeError as error:
        if world.size == 1 or isinstance(error, RunError):
            raise
        steps = Checkpoints(run.output).steps()
        last = f"the last whole checkpoint is that of step {steps[-1]}" if steps else "there is no checkpoint yet"
        reason = first_line(error)
        raise RunError(
            f"rank {world.rank} of {world.size} cannot continue, most likely because another rank has ended: {reason}. "
            f"The run is over; {last}; --resume continues from there"
        ) from error
    world.leave()
    return summary


# ---- the run ---------------------------------------------------------------------------------------------------------


def model_source(settings: PretrainSettings, run: RunSettings) -> PretrainSettings:
    """The settings of a run's model: a resumed run does not need the checkpoint that it started from."""
    checkpoints = Checkpoints(run.output)
    if settings.init is None or not run.resume or not checkpoints.steps():
        return settings
    return dataclasses.replace(settings, init=str(checkpoints.path(checkpoints.steps()[-1])))


def _batches_per_step(settings: PretrainSettings, run: RunSettings, world: World) -> int:
    """The batches of a step over all ranks. A run keeps them when another number of ranks resumes it."""
    count = settings.batches_per_step
    if count is None and run.resume and (run.output / SETTINGS).is_file():
        count = read_settings(run.output)[0].batches_per_step
    count = count or world.size
    if count % world.size:
        raise RunError(f"batches per step: expected a multiple of the {world.size} processes, got {count}")
    return count


class _Run:
    def __init__(self, settings: PretrainSettings, run: RunSettings, world: World, held: contextlib.ExitStack) -> None:
        """``held`` keeps the directory's lock."""
        self.batches_per_step = _batches_per_step(settings, run, world)
        settings = dataclasses.replace(settings, batches_per_step=self.batches_per_step)
        self.settings, self.run, self.world, self.held = settings, run, world, held
        self.steps = settings.schedule.steps
        self.checkpoints = Checkpoints(run.output, run.keep)
        world.main_first(self._open_directory)
        self.corpus = world.main_first(self._open_corpus)
        source = model_source(settings, run)
        self.longest = longest_sequence(source)
        self.model = make_model(source, self.corpus.tokenizer).to(world.device)
        self.files = ModelFiles(self.model, world)
        self.objective = objective(settings).module(self.model)
        step = settings.step
        module = share_out(self.objective, world, gradient_dtype=step.gradient_dtype, fp8=step.precision == "fp8")
        how: dict[str, Any] = {"capturable": settings.step.cuda_graph, "sharded": run.shard_optimizer}
        optimizer = make_optimizer(module, settings.optimizer, **how)
        schedule = Schedule(optimizer, settings.schedule)
        how = {"world": world, "seed": settings.seed}
        self.trainer = Trainer(module, Objective.of(self.objective), optimizer, schedule, settings.step, **how)
        self.phases = phases(settings, self.batches_per_step)
        self.streams = [self._stream(self.corpus.training, phase, self._workers()) for phase in self.phases]
        self.evaluation = self._evaluation_batches()
        self.sharded = ShardedCheckpoints(self.checkpoints, world) if run.checkpoints == "sharded" else None
        self.start = self._resume() if run.resume else 0

    def _open_directory(self) -> None:
        """Prepares the directory, first in the main process. Files of an earlier run are kept until this one is ready
        to start (``_replace_earlier_run``)."""
        if not self.world.main:
            return
        self._check_directory()
        self.held.enter_context(run_lock(self.run.output))
        self._check_directory()  # again, because another run may have started in between
        self.checkpoints.clean()
        if not self.checkpoints.steps():
            write_settings(self.settings, self.run)
        shutil.rmtree(self.run.output / _NEW_TOKENIZER, ignore_errors=True)

    def _check_directory(self) -> None:
        """Raises if this run would overwrite files without permission."""
        output, tokenizer = self.run.output, self.settings.tokenizer
        inside = tokenizer is not None and Path(os.path.realpath(output)) in Path(os.path.realpath(tokenizer)).parents
        if inside and not self._continues():
            raise ValueError(f"tokenizer: expected one outside of the run that is replaced, got {tokenizer}")
        if self.run.resume and not self.checkpoints.steps() and not (output / SETTINGS).is_file():
            raise not_a_run(output)
        if self.run.resume or self.run.overwrite or not output.is_dir():
            return
        if self.checkpoints.steps():
            raise RunError(f"{output} has checkpoints: --resume continues that run, --overwrite starts a new one")
        if foreign := sorted(path.name for path in output.iterdir() if not _LEFT.fullmatch(path.name)):
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            got = f"one with {foreign[0]}{more}"
            raise RunError(f"{output}: expected a new or empty directory, got {got}: --overwrite starts a run there")

    def _continues(self) -> bool:
        return self.run.resume and bool(self.checkpoints.steps())

    def _tokenizer(self) -> Path:
        """The folder of a trained tokenizer, which differs from an earlier run's while this one is prepared."""
        return self.run.output / (_TOKENIZER if self._continues() else _NEW_TOKENIZER)

    def _open_corpus(self) -> Corpus:
        trained = self._tokenizer()
        return open_corpus(self.settings, self.run, trained, load=trained.is_dir())

    def _replace_earlier_run(self) -> None:
        """Removes the files of an earlier run; the main process calls this right before the first step."""
        write_settings(self.settings, self.run)
        if self._continues():
            return
        output = self.run.output
        for path in [*map(self.checkpoints.path, self.checkpoints.steps()), output / EVENTS, output / _TOKENIZER]:
            shutil.rmtree(path, ignore_errors=True)
        for path in (output / files.LATEST, output / CURVES):
            path.unlink(missing_ok=True)
        if (output / _NEW_TOKENIZER).is_dir():
            os.rename(output / _NEW_TOKENIZER, output / _TOKENIZER)

    def _phase(self) -> int:
        """The number of the next step's phase."""
        running = (number for number, phase in enumerate(self.phases) if self.trainer.completed < phase.until)
        return next(running, len(self.phases) - 1)

    def _stream(self, shards: data.TokenShards | data.StreamedShards, phase: Phase, workers: int) -> _Stream:
        settings = self.settings
        kind: Any = objective(settings).sequences
        options: dict[str, Any] = {"tokens_per_batch": phase.tokens, "seed": settings.seed, "workers": workers}
        options |= {"rank": self.world.rank, "world_size": self.world.size}
        sequence_format = data.SequenceFormat(kind, phase.max_length)
        with _too_small(shards):
            if isinstance(shards, data.TokenShards):
                return data.BatchStream(shards, sequence_format, masking(settings), **options)
            options["window_tokens"] = settings.window_tokens
            if shards is self.corpus.training:
                options["batches_per_step"] = self.batches_per_step
            else:  # all ranks read the same few windows
                options["window_tokens"] = min(settings.window_tokens, _VALIDATION_WINDOW * phase.tokens)
            return data.ShardStream(shards, sequence_format, masking(settings), **options)

    def _workers(self) -> int:
        if self.run.workers is not None:
            return self.run.workers
        return min(2, os.cpu_count() or 1) if self.world.device.type == "cuda" else 0

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """The settings that must be the same when the run is resumed."""
        nested = dataclasses.asdict(self.settings)
        flat = {name: value for name, value in nested.items() if not isinstance(value, dict)}
        for part in ("optimizer", "schedule", "step", "changes"):
            flat |= {f"{part} {name}": value for name, value in nested[part].items()}
        names = {"optimizer name": "optimizer", "schedule kind": "schedule", "schedule steps": "steps"}
        values = {names.get(name, name): value for name, value in flat.items()}
        values |= {"corpus": self.corpus.training.fingerprint}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def save(self) -> Path:
        """Saves a checkpoint; a sharded one is complete after ``sharded.wait``. All processes call this, after a flush
        of results. The last checkpoint of a run is whole, so that it opens as a model."""
        check_finite(self.model, self.world)
        step, optimizer = self.trainer.completed, self.trainer.optimizer
        path = self.checkpoints.path(step)
        state: dict[str, Any] = {
            "settings": self._facts(),
            "trainer": self.trainer.state_dict(),
            "data": self._position(),
        }
        if self.sharded is not None and step < self.steps:
            tensors = sharded_checkpoints.tensors_of(self.model, optimizer)
            kept = copy.deepcopy(state)  # FP8's scales change while the checkpoint is written
            self.sharded.start(step, tensors, self._writer(self.model.save_config, kept))
            return path
        self._wait()
        write_model = self.files.writer()
        collect = self.world.main or self.world.parallel == "fsdp" or self.run.shard_optimizer
        state["optimizer"] = files.optimizer_state(optimizer) if collect else {}
        return self.checkpoints.save(step, self._writer(write_model, state)) if self.world.main else path

    def _writer(self, write_model: Callable[[Path], None], state: dict[str, Any]) -> Callable[[Path], None]:
        """Writes model, tokenizer and state into a checkpoint's directory."""

        def write(directory: Path) -> None:
            write_model(directory)
            for folder in (directory, *(path.parent for path in directory.glob(f"*/{CONFIG}"))):  # ELECTRA's two
                self.corpus.tokenizer.save(folder, model_max_length=self.longest, config=self.model.config)
            files.write_state(directory, state)

        return write

    def _wait(self) -> None:
        """Waits for a sharded checkpoint that is being written."""
        if self.sharded is not None:
            self.sharded.wait()

    def _position(self) -> dict[str, Any]:
        """The position in the data; of a stream in the main process that of all ranks."""
        stream = self.streams[self._phase()]
        if isinstance(stream, data.BatchStream):
            return stream.state_dict()
        state = stream.state_dict()
        return stream.joined(self.world.gather(state) or [state])

    def _resume(self) -> int:
        newest = self.checkpoints.newest()
        if newest is None:
            return 0
        state = files.read_state(newest)
        try:
            then, now = state["settings"], self._facts()
            if self.run.more_steps and now["steps"] >= then["steps"]:
                then = {**then, "steps": now["steps"]}
            changed = files.differences(then, now)
            if changed:
                raise RunError(f"{newest} is of a run with other settings: {'; '.join(changed)}")
            if (newest / SHARDS).is_dir():
                sharded_checkpoints.read(newest, self.model, self.trainer.optimizer, self.world)
            else:
                self.files.read(newest)
                files.load_optimizer_state(self.trainer.optimizer, state["optimizer"])
            self.trainer.load_state_dict(state["trainer"])
            self.streams[self._phase()].load_state_dict(state["data"])
        except (KeyError, IndexError, TypeError) as error:
            raise RunError(f"{newest / files.STATE}: not the state of a pre-training run: {error!r}") from error
        return self.trainer.completed

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(self) -> Summary | None:
        run, trainer, main = self.run, self.trainer, self.world.main
        peak = peak_flops(self.world.device)
        peak = None if peak is None else peak * self.world.size
        progress = Progress(self.steps, start=self.start, peak=peak) if main and run.progress else None
        if progress is not None:
            progress.note(self._description())
        terms = self.objective.terms
        with _too_small(self.corpus.training):
            batches = _begun(self._batches(progress))
        log = None
        self.world.gather(None)  # until every process has read the files that are replaced now
        if main:
            self._replace_earlier_run()
            steps: dict[str, Any] = {"steps": self.steps, "every": run.log_every, "start": self.start}
            weights = self.objective.weights
            log = RunLog(run.output, terms, weights=weights, **steps, progress=progress, peak=peak, perplexity=terms[0])
        evaluate_every = run.evaluate_every or max(1, math.ceil(self.steps / 10))
        checkpoint_every = run.checkpoint_every or min(1000, max(1, math.ceil(self.steps / 5)))
        checkpoint = self.checkpoints.path(self.start)
        with Stop(launched=self.world.size > 1) as stop, contextlib.ExitStack() as on_error:
            on_error.callback(lambda: None if log is None else log.abandon())
            while trainer.completed < self.steps:
                results = trainer.step(list(itertools.islice(batches, self.batches_per_step // self.world.size)))
                if log is not None:
                    log.add(results)
                ended = trainer.completed == self.steps
                evaluates = ended or trainer.completed % evaluate_every == 0
                saves = ended or trainer.completed % checkpoint_every == 0 or (stop.asked and self.world.size == 1)
                if evaluates or saves:
                    checkpoint = self._pause(log, evaluates, saves) or checkpoint
                if stop.asked and not ended:
                    self._stopped(checkpoint, saved=saves)
            on_error.pop_all()
        if progress is not None:
            progress.close()
        return None if log is None else self._finish(log, checkpoint)

    def _batches(self, progress: Progress | None) -> Iterator[data.Batch]:
        begin = self._phase()
        for phase, stream in zip(self.phases[begin:], self.streams[begin:], strict=True):
            if progress is not None and len(self.phases) > 1:
                progress.note(f"sequences of up to {phase.max_length} tokens until step {phase.until}")
            batches = self._of_one_shape(phase, stream) if self.settings.step.cuda_graph else iter(stream)
            while self.trainer.completed < phase.until:
                yield next(batches)

    def _of_one_shape(self, phase: Phase, stream: _Stream) -> Iterator[data.Batch]:
        tokens, padding = phase.tokens, self.corpus.tokenizer.special.pad or 0
        # Some sequences are short: the shape has twice as many as full-length ones; larger batches run without the
        # graph.
        sequences = 2 * math.ceil(tokens / phase.max_length) + 8
        shape = Shape(tokens, sequences, stream.max_predictions or 0, padding)
        return (filled(batch, shape) for batch in stream)

    def _pause(self, log: RunLog | None, evaluates: bool, saves: bool) -> Path | None:
        """Evaluates and saves; the time does not count as training."""
        results = self.trainer.flush()
        if log is not None:
            log.add(results)
        held_out = None
        with _paused(log):
            if evaluates:
                held_out = self.trainer.evaluate(self.evaluation, self.run.evaluation_batches)
            if log is not None:
                log.write(held_out)
            return self.save() if saves else None

    def _evaluation_batches(self) -> list[data.Batch]:
        """The validation batches, the same in each evaluation, with sequences as in the last phase. They are made
        before the first step, so that a validation set that is too small raises then."""
        shards = self.corpus.held_out
        stream = self._stream(shards, self.phases[-1], workers=0)
        with _too_small(shards):
            return list(itertools.islice(stream, math.ceil(self.run.evaluation_batches / self.world.size)))

    def _stopped(self, checkpoint: Path, *, saved: bool) -> None:
        if saved:
            self._wait()
        elif self.checkpoints.steps():  # a sharded one may be incomplete
            checkpoint = self.checkpoints.path(self.checkpoints.steps()[-1])
        where = f"{checkpoint} was written" if saved else f"the last whole checkpoint is {checkpoint}"
        raise RunError(
            f"stopped by a signal after step {self.trainer.completed}; {where}; --resume continues from there"
        )

    def _description(self) -> str:
        settings = self.settings
        ranks = "" if self.world.size == 1 else f", {self.world.size} ranks ({self.world.parallel})"
        begin = f", from step {self.start} on" if self.start else ""
        return (
            f"{self._title()}: {files.count_parameters(self.model) / 1e6:.1f} million parameters, "
            f"vocabulary of {self.corpus.tokenizer.vocab_size:,}; {self.corpus}; "
            f"{self.world.device}{ranks}, {settings.step.precision}, {objective(settings).module.name}{begin}"
        )

    def _title(self) -> str:
        """The model's family and size or checkpoint, and the fields of its configuration that were changed."""
        settings = self.settings
        name = (
            f"{settings.family} {settings.size}" if settings.init is None else f"{settings.family} of {settings.init}"
        )
        changed = ", ".join(f"{field}={value}" for field, value in settings.changes.items())
        return f"{name} with {changed}" if changed else name

    def _finish(self, log: RunLog, checkpoint: Path) -> Summary:
        rate = log.rate()
        log.close()
        title = f"{self._title()}, {self.settings.tokens_per_step:,} tokens per step"
        write_curves(log.path, self.run.output / CURVES, title)
        return Summary(
            self.run.output,
            checkpoint,
            self.trainer.completed,
            log.tokens,
            self.trainer.skipped,
            log.loss,
            log.loss_sum,
            log.held_out,
            rate,
            self.evaluation[0],
            self._learnt(log.held_out),
        )

    def _learnt(self, held_out: dict[str, float]) -> Learnt | None:
        """What the model has learnt; None for a resumed run without steps left, and so without an evaluation."""
        if not isinstance(self.objective, (MaskedLM, CausalLM)) or self.world.size > 1 or not held_out:
            return None
        training, validation = self.corpus.training, self.corpus.held_out
        if not (isinstance(training, data.TokenShards) and isinstance(validation, data.TokenShards)):
            return None  # a stream has no frequencies of words
        return learnt(
            self.objective,
            self.corpus.tokenizer,
            training,
            validation,
            self.evaluation,
            held_out[self.objective.terms[0]],
        )


def _paused(log: RunLog | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if log is None else log.paused()


def _begun(batches: Iterator[data.Batch]) -> Iterator[data.Batch]:
    """The same batches, of which the first, if there is one, is computed now."""
    return itertools.chain(list(itertools.islice(batches, 1)), batches)


@contextlib.contextmanager
def _too_small(shards: data.TokenShards | data.StreamedShards) -> Iterator[None]:
    """A context in which an error about missing batches becomes a RunError."""
    try:
        yield
    except data.DataError:
        raise
    except ValueError as error:
        here = f"{shards.documents} documents" if isinstance(shards, data.TokenShards) else f"{len(shards.files)} files"
        raise RunError(f"the data are too small, {here} here: {error}") from error
