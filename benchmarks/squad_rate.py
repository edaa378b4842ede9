"""Samples per second of BERT-large that answers questions, as MLPerf Inference runs it: offline and as a server.

    python benchmarks/squad_rate.py --out benchmarks/results
    python benchmarks/squad_rate.py --size tiny --features 40 --train-seconds 5 --seconds 1 --precisions float32

A sample is a feature: a question and a window of up to 384 tokens over its context, with windows 128 tokens apart. The
questions are the shipped ones; a context is consecutive sentences of the shipped English text, joined until they have
a number of words that is drawn from a lognormal distribution with the mean (123) and about the spread of the paragraphs
of SQuAD 1.1's dev set. A WordPiece vocabulary of 16,384 tokens is trained on the same text. The lengths that follow are
printed. A sample counts when its best span and its score of "no answer" are on the host.

    offline   all samples at once, from ids on the host
    server    samples arrive one by one, at random times (Poisson); the highest rate at which 99% are answered within
              130 ms, found by bisection

Contenders: ``Session`` in each precision, and transformers' model with its own attention (sdpa) in bf16, in padded
batches of features sorted by length; its spans are found by the same code.

The weights are trained on the shipped questions, from random ones, for a given time. Scores of a precision are of the
training questions and of the dev set, next to those of fp32: the training questions show whether a precision changes
answers that the model is sure of. The model is not a pre-trained one.
"""

from __future__ import annotations

import argparse
import math
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from training_step import append_row, versions

from fasttfm import __version__, models
from fasttfm.bench.timing import device_name, file_stem
from fasttfm.data import read_documents, train_tokenizer
from fasttfm.data.task_files import QuestionExample
from fasttfm.data.texts import shipped_corpus, shipped_task
from fasttfm.inference import AnswerSpans, Session
from fasttfm.inference.formats import Tokens, encoder_format
from fasttfm.models.families import family_of_type
from fasttfm.optim import AdamW
from fasttfm.tasks.questions import QuestionTask
from fasttfm.tasks.task import Language

LENGTH, STRIDE, VOCABULARY = 384, 128, 16384
WORDS, SPREAD, FEWEST, MOST = 123, 0.45, 25, 630  # of a context
LIMIT_SECONDS, QUANTILE = 0.13, 99  # of MLPerf's server scenario
SERVER_STEPS = 5  # of the bisection
CPU_TOKENS, GPU_TOKENS = 2048, 40960  # of a batch of transformers, padding included


class Samples(NamedTuple):
    """Features, and how their spans are found."""

    tokens: list[Tokens]
    answers: AnswerSpans

    @property
    def lengths(self) -> list[int]:
        return [len(each.ids) for each in self.tokens]

    @property
    def calibration(self) -> list[list[int]]:
        """The ids from which the scales of FP8 follow."""
        return [each.ids for each in self.tokens[:64]]


# ---- data ------------------------------------------------------------------------------------------------------------


def contexts(lines: Sequence[str], generator: random.Random) -> Any:
    """Yields consecutive lines, joined until they have a drawn number of words."""
    at, location = 0, math.log(WORDS) - SPREAD**2 / 2
    while True:
        words = min(max(generator.lognormvariate(location, SPREAD), FEWEST), MOST)
        found: list[str] = []
        while sum(map(len, map(str.split, found))) < words:
            found.append(lines[at % len(lines)])
            at += 1
        yield " ".join(found)


def samples_of(task: QuestionTask, count: int, lines: Sequence[str], questions: Sequence[str]) -> Samples:
    generator = random.Random(0)
    source = contexts(lines, generator)
    features: list[Any] = []
    while len(features) < count:
        asked = [QuestionExample("", generator.choice(questions), next(source), [], False) for _ in range(256)]
        features += task.features(asked)
    tokens = [feature.target.window.tokens for feature in features[:count]]
    return Samples(tokens, task.answers_of_session)


# ---- weights ---------------------------------------------------------------------------------------------------------


def trained(config: Any, task: QuestionTask, examples: Sequence[Any], seconds: float, device: torch.device) -> Any:
    """A model that was trained on examples for a time."""
    torch.manual_seed(0)
    model = models.BertForQuestionAnswering(config).to(device).train()
    features = task.features(examples)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    generator, steps, loss = random.Random(0), 0, torch.zeros(())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        optimizer.param_groups[0]["lr"] = 1e-4 * min(1.0, (steps + 1) / 100)
        drawn = task.batch(generator.sample(features, min(64, len(features)))).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**drawn.inputs(), **task.targets(drawn) if not drawn.targets else drawn.targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 20 == 0:  # otherwise the host is far ahead of the GPU
            loss.item()
    print(f"trained for {steps} steps, loss {loss.item():.3f}", flush=True)
    return model.eval().requires_grad_(False)


def answers(session: Session, task: QuestionTask, examples: Sequence[Any]) -> tuple[list[Any], float]:
    """The predicted spans, and their F1."""
    features = task.features(examples)
    tokens = [feature.target.window.tokens for feature in features]
    rows = session.submit_sequences(tokens, output="spans").result()
    read = task.read_rows(task.batch(features), rows)
    predictions = task.predictions(examples, features, read)
    return [each.text for each in predictions], 100 * task.scores(examples, predictions)["f1"]


# ---- contenders ------------------------------------------------------------------------------------------------------


def run_session(session: Session, samples: Samples) -> np.ndarray:
    found: np.ndarray = session.submit_sequences(samples.tokens, output="spans").result()
    return found


class Transformers:
    """transformers' model with the same weights."""

    def __init__(self, directory: str, samples: Samples, device: torch.device) -> None:
        import transformers

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        found: Any = transformers.BertForQuestionAnswering.from_pretrained(directory, dtype=dtype)
        self.model, self.device, self.answers = found.to(device).eval(), device, samples.answers
        self.order = sorted(range(len(samples.tokens)), key=samples.lengths.__getitem__, reverse=True)
        self.most = GPU_TOKENS if device.type == "cuda" else CPU_TOKENS

    @torch.inference_mode()
    def run(self, samples: Samples) -> np.ndarray:
        found, at = [], 0
        while at < len(self.order):
            longest = len(samples.tokens[self.order[at]].ids)
            group = self.order[at : at + max(1, self.most // longest)]
            found.append(self._spans([samples.tokens[index] for index in group], longest))
            at += len(group)
        rows = np.empty((len(self.order), 4), np.float32)
        rows[self.order] = torch.cat(found).cpu().numpy()
        return rows

    def _spans(self, group: list[Tokens], longest: int) -> torch.Tensor:
        ids, segments, mask = np.zeros((3, len(group), longest), np.int64)
        for row, tokens in enumerate(group):
            count = len(tokens.ids)
            ids[row, :count], segments[row, :count], mask[row, :count] = tokens.ids, tokens.segments, 1
        given = [torch.from_numpy(each).to(self.device, non_blocking=True) for each in (ids, segments, mask)]
        output = self.model(input_ids=given[0], token_type_ids=given[1], attention_mask=given[2])
        kept = given[2].bool()
        logits = torch.stack([output.start_logits[kept], output.end_logits[kept]], -1).float()
        lengths = given[2].sum(1)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return self.answers.found(logits, given[1][kept], cu_seqlens, longest)


# ---- scenarios -------------------------------------------------------------------------------------------------------


def offline(run: Any, samples: Samples, rounds: int) -> float:
    """Samples per second: the median over rounds, after one to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        run(samples)
        seconds.append(time.perf_counter() - begun)
    return float(len(samples.tokens) / np.median(seconds[1:]))


def latencies(session: Session, samples: Samples, rate: float, seconds: float) -> np.ndarray:
    """Seconds from each sample's time of arrival to its answer, for arrivals at random times."""
    generator = np.random.default_rng(0)
    count = max(20, int(rate * seconds))
    arrivals = np.cumsum(generator.exponential(1 / rate, count))
    chosen = generator.integers(0, len(samples.tokens), count).tolist()
    ends, left, done = np.zeros(count), [count], threading.Event()

    def finish(index: int, future: Any) -> None:
        future.result()
        ends[index] = time.perf_counter()
        left[0] -= 1  # futures end in the dispatcher's thread
        if not left[0]:
            done.set()

    begun = time.perf_counter()
    for index, arrival in enumerate(arrivals.tolist()):
        while (wait := begun + arrival - time.perf_counter()) > 0:
            time.sleep(wait if wait > 2e-4 else 0)
        tokens = samples.tokens[chosen[index]]
        future = session.submit_sequences([tokens], output="spans", single=True)
        future.add_done_callback(lambda future, index=index: finish(index, future))  # type: ignore[misc]
    if not done.wait(60):
        raise TimeoutError("squad_rate: the session did not answer within a minute")
    return ends - begun - arrivals


def server(session: Session, samples: Samples, highest: float, seconds: float) -> tuple[float, float]:
    """The highest rate that keeps the limit, and its 99th percentile in ms. CUDA graphs are captured at half of the
    ``highest`` rate before."""
    latencies(session, samples, highest / 2, seconds)
    low, high, kept = 0.0, highest, 0.0
    for _ in range(SERVER_STEPS):
        rate = (low + high) / 2
        late = float(np.percentile(latencies(session, samples, rate, seconds), QUANTILE))
        print(f"  {rate:.0f} a second: p{QUANTILE} {1e3 * late:.1f} ms", flush=True)
        if late <= LIMIT_SECONDS:
            low, kept = rate, late
        else:
            high = rate
    return low, 1e3 * kept


# ---- the run ---------------------------------------------------------------------------------------------------------


def made_session(model: Any, precision: str, samples: Samples) -> Session:
    own: dict[str, Any] = {"dtype": torch.bfloat16}
    if precision == "float32":
        own = {"dtype": torch.float32}
    if precision in ("fp8", "int8"):
        own = {"precision": precision} | ({"calibration": samples.calibration} if precision == "fp8" else {})
    return Session(model, answers=samples.answers, max_batch=1024, **own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="large", choices=models.BertConfig.sizes)
    parser.add_argument("--features", type=int, default=10833, help="as many as SQuAD 1.1's dev set has")
    parser.add_argument("--precisions", nargs="+", default=["bfloat16", "fp8"])
    parser.add_argument("--train-seconds", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=2.0, help="of arrivals at one rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=Path, help="directory of the .csv file")
    settings = parser.parse_args()
    device = torch.device(settings.device)
    lines = [line for text in read_documents(shipped_corpus()) for line in text.split("\n") if line.strip()]
    tokenizer = train_tokenizer("wordpiece", lines, VOCABULARY)
    family, config = family_of_type("bert"), models.BertConfig.named(settings.size)
    assert family is not None
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    form = encoder_format(family, config, tokenizer, LENGTH)
    task = QuestionTask(Language(tokenizer, family, form), None, stride=STRIDE)
    train, dev = (QuestionTask.read_file(path) for path in shipped_task("qa").values())
    samples = samples_of(task, settings.features, lines, [each.question for each in train])
    low, middle, high = np.percentile(samples.lengths, (5, 50, 95))
    spread = f"mean {np.mean(samples.lengths):.0f}, p5 {low:.0f}, p50 {middle:.0f}, p95 {high:.0f}"
    print(f"{len(samples.tokens)} features: tokens {spread}", flush=True)
    model = trained(config, task, train, settings.train_seconds, device)
    report(settings, model, task, samples, {"train": train, "dev": dev})


def report(settings: Any, model: Any, task: QuestionTask, samples: Samples, examples: dict[str, Sequence[Any]]) -> None:
    """Measures all contenders, prints their figures and appends their rows."""
    device = torch.device(settings.device)
    exact = {}
    with made_session(model, "float32", samples) as session:
        exact = {name: answers(session, task, given) for name, given in examples.items()}
    for precision in settings.precisions:
        with made_session(model, precision, samples) as session:
            figures: dict[str, Any] = {}
            for name, given in examples.items():
                texts, f1 = answers(session, task, given)
                same = np.mean([one == other for one, other in zip(texts, exact[name][0], strict=True)])
                figures |= {f"{name}_f1": f1, f"{name}_f1_fp32": exact[name][1], f"{name}_same": 100 * float(same)}
            rate = offline(lambda given, session=session: run_session(session, given), samples, settings.rounds)
            served, late = server(session, samples, rate, settings.seconds)
            write(settings, f"session {precision}", samples, rate, (f"{served:.1f}", f"{late:.1f}"), figures)
    if not settings.no_peer:
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            peer = Transformers(directory, samples, device)
            write(settings, "transformers", samples, offline(peer.run, samples, settings.rounds), ("", ""), {})


FIGURES = tuple(f"{name}_{which}" for name in ("train", "dev") for which in ("f1", "f1_fp32", "same"))


def write(
    settings: Any, name: str, samples: Samples, rate: float, served: tuple[str, str], figures: dict[str, Any]
) -> None:
    device = torch.device(settings.device)
    row: dict[str, Any] = {"model": f"bert-{settings.size}", "features": len(samples.tokens)}
    row |= {"mean_tokens": f"{np.mean(samples.lengths):.1f}", "contender": name, "offline": f"{rate:.1f}"}
    row |= dict(zip(("server", "server_p99_ms"), served, strict=True))
    row |= {key: f"{figures[key]:.2f}" if key in figures else "" for key in FIGURES}
    row |= {"device": device_name(device), **versions(), "fasttfm_version": __version__}
    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if settings.out is not None:
        append_row(settings.out / f"{file_stem(device)}-squad.csv", row)


if __name__ == "__main__":
    main()
