"""Zero-, one- and few-shot evaluation: prompts with labelled examples, answers by likelihood or generation, scores."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _extras
from fasttfm.data.prompt_files import Question
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.generate import Generation
from fasttfm.generate.loop import session_of
from fasttfm.models.families import longest_input
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.distillation_recipes import encode
from fasttfm.tasks.inputs import Feature, Tokens, by_budget, collate
from fasttfm.tasks.metrics import Scores, answer_f1, exact_match, label_scores, scikit_learn
from fasttfm.tasks.prompts import Prompt, Shot, text_pieces, until

NORMALIZATIONS = ("none", "tokens", "bytes", "unconditional")
ANSWERS = ("likelihood", "generate", "last-word")
_SEQUENCES = 8  # generated at a time
_QUESTIONS = 64  # whose last words are predicted together
METRICS = ("accuracy", "f1", "exact_match", "answer_f1", "bleu", "rouge", "perplexity")


@dataclass(frozen=True)
class Preset:
    """The prompt format of a kind of task, from the papers.

    Args:
        files: The kind of its files, of ``prompt_files.KINDS``.
        answer: One of ``ANSWERS``.
        stop: The text at which a generated answer ends; by default the separator.
        labels: The words for the labels of the files.
        truncated: The part of a question that is left out if it does not fit: its ``"end"`` or its ``"start"``.
        max_new_tokens: The maximum number of tokens of a generated answer.
    """

    files: str
    template: str | None
    separator: str
    answer: str
    metrics: tuple[str, ...]
    stop: str | None = None
    labels: Mapping[str, str] | None = None
    truncated: str = "start"
    max_new_tokens: int = 50


_SENTIMENT = {"0": "negative", "1": "positive"}  # SST-2's labels

# GPT-2's reading comprehension, summaries, translations and last words, GPT-3's classification.
PRESETS = {
    "classify": Preset("classify", None, "\n\n", "likelihood", ("accuracy", "f1")),
    "sentiment": Preset(
        "classify",
        "Review: {input}\nSentiment: {output}",
        "\n\n",
        "likelihood",
        ("accuracy", "f1"),
        labels=_SENTIMENT,
    ),
    "choice": Preset("choice", None, "\n\n", "likelihood", ("accuracy",)),
    "last-word": Preset("last-word", "{input} {output}", "\n\n", "last-word", ("accuracy", "perplexity")),
    "tldr": Preset(
        "summary", "{input}\nTL;DR: {output}", "\n\n", "generate", ("rouge",), truncated="end", max_new_tokens=100
    ),
    "translate": Preset("translate", "{input} = {output}", "\n", "generate", ("bleu",)),
    "reading": Preset("reading", "{input}\nA: {output}", "\n\n", "generate", ("exact_match", "answer_f1"), "\n"),
}


@dataclass
class Evaluation:
    """Answers of a causal LM to prompts.

    Args:
        model: A causal LM, on the device where it is to run.
        prompt: Description, template and separator; its examples are replaced by drawn ones.
        answer: ``"likelihood"`` to compare the choices, ``"generate"``, or ``"last-word"`` to predict the tokens of the
            right answer, each after the right ones before it (LAMBADA).
        normalization: How the log-likelihoods of choices are normalized: ``"none"``, by the number of ``"tokens"`` or
            ``"bytes"``, or by the ``"unconditional"`` probability after the end of the template (GPT-3).
        stop: The text at which a generated answer ends.
        truncated: The part of a question that is left out if it does not fit into the model: its ``"start"`` or its
            ``"end"``.
    """

    model: PretrainedModel
    tokenizer: Tokenizer
    prompt: Prompt
    answer: str = "likelihood"
    normalization: str = "tokens"
    max_new_tokens: int = 50
    stop: str = "\n"
    tokens_per_batch: int = 16384
    truncated: str = "start"
    left_out: int = 0  # the number of examples that did not fit into prompts
    cut: int = 0  # the number of questions that were truncated

    def __post_init__(self) -> None:
        if self.answer not in ANSWERS:
            raise ValueError(f"answer: expected one of {', '.join(ANSWERS)}, got {self.answer!r}")
        if self.normalization not in NORMALIZATIONS:
            expected = ", ".join(NORMALIZATIONS)
            raise ValueError(f"normalization: expected one of {expected}, got {self.normalization!r}")
        self.model.eval()
        self.likelihoods: list[float] = []  # last-word: the log-likelihood of each right answer of the last call
        self._longest = longest_input(self.model.config)
        self._device = next(self.model.parameters()).device

    def answers(self, questions: Sequence[Question], shots: Sequence[Question], k: int, seed: int) -> Iterator[str]:
        """Yields an answer to each question, after a prompt with ``k`` of the ``shots``, drawn for each question with
        the seed. A question's own example is never drawn."""
        labels = list(dict.fromkeys(question.outputs[0] for question in (shots or questions)))
        prompts = self._prompts(questions, shots, k, seed)
        self.likelihoods = []
        if self.answer == "generate":
            yield from self._generated(prompts)
        elif self.answer == "last-word":
            yield from self._last_words(prompts)
        else:
            for prompt, question in prompts:
                yield self._most_likely(prompt, question, question.choices or labels)

    def _prompts(
        self, questions: Sequence[Question], shots: Sequence[Question], k: int, seed: int
    ) -> Iterator[tuple[Prompt, Question]]:
        for index, question in enumerate(questions):
            others = [shot for shot in shots if shot.input != question.input]
            if k > len(others):
                raise ValueError(f"shots: expected at least {k} examples to draw from, got {len(others)}")
            drawn = random.Random(f"{seed} {k} {index}").sample(others, k)
            yield replace(self.prompt, shots=[Shot(shot.input, shot.outputs[0]) for shot in drawn]), question

    def _fitting(self, prompt: Prompt, question: Question, room: int) -> list[int]:
        """The ids of the prompt, without the first examples if not all fit."""
        if room < 1:
            raise ValueError(f"prompt: expected fewer new tokens than the model's {self._longest} positions")
        text = self._shortened(replace(prompt, shots=()), question.input, room)
        fitting = prompt.fitting(text, self._size, room)
        self.left_out += len(prompt.shots) - len(fitting.shots)
        return self.tokenizer.encode(fitting.text(text))

    def _size(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def _shortened(self, prompt: Prompt, text: str, room: int) -> str:
        """The text of a question, truncated if a prompt without examples exceeds ``room`` tokens."""
        if self._size(prompt.text(text)) <= room:
            return text
        self.cut += 1
        ids = self.tokenizer.encode(text)
        kept = room - self._size(prompt.text("")) + 1
        while (kept := kept - 1) > 0:
            shorter = self.tokenizer.decode(ids[:kept] if self.truncated == "end" else ids[-kept:])
            if self._size(prompt.text(shorter)) <= room:
                return shorter
        raise ValueError(
            f"prompt: expected room for a question in {room} tokens, got a longer description and template"
        )

    def _generated(self, prompts: Iterable[tuple[Prompt, Question]]) -> Iterator[str]:
        """Yields generated answers, each up to ``stop``. Several questions are answered at a time."""
        model: Any = self.model
        session = session_of(model, _SEQUENCES, self._longest)
        end = self.tokenizer.special.eos if self.model.config.eos_token_id is None else None
        waiting: deque[Generation] = deque()

        def answer() -> str:
            sequence = waiting.popleft()
            text = "".join(until(text_pieces(self.tokenizer, iter(sequence)), self.stop)).strip()
            sequence.cancel()
            return text

        for prompt, question in prompts:
            ids = self._fitting(prompt, question, self._longest - self.max_new_tokens)
            waiting.append(session.submit(ids, max_new_tokens=self.max_new_tokens, eos_token_id=end))
            if len(waiting) == 2 * _SEQUENCES:  # some wait for the slots of those that stop early
                yield answer()
        while waiting:
            yield answer()

    def _most_likely(self, prompt: Prompt, question: Question, choices: Sequence[str]) -> str:
        endings = [self.tokenizer.encode(prompt.answer_prefix + choice) for choice in choices]
        if not all(endings):
            raise ValueError(f"choices: expected a token in every choice, got none in {choices[endings.index([])]!r}")
        ids = self._fitting(prompt, question, self._longest - max(map(len, endings)))
        scores = self.log_likelihoods([(ids, ending) for ending in endings])
        if self.normalization == "tokens":
            scores = [score / len(ending) for score, ending in zip(scores, endings, strict=True)]
        elif self.normalization == "bytes":
            scores = [score / max(1, len(choice.encode())) for score, choice in zip(scores, choices, strict=True)]
        elif self.normalization == "unconditional":
            context = self.tokenizer.encode(prompt.form.removesuffix("{output}").rpartition("{input}")[2].strip())
            if not context:
                expected = "a template with text between {input} and {output} for unconditional probabilities"
                raise ValueError(f"template: expected {expected}, got {prompt.form!r}")
            without = self.log_likelihoods([(context, ending) for ending in endings])
            scores = [score - other for score, other in zip(scores, without, strict=True)]
        return choices[max(range(len(scores)), key=scores.__getitem__)]

    def _last_words(self, prompts: Iterable[tuple[Prompt, Question]]) -> Iterator[str]:
        """Yields the most likely token for each token of the right answer, after the right ones before it: what greedy
        decoding generates, if it is right."""
        rest = iter(prompts)
        while group := list(itertools.islice(rest, _QUESTIONS)):
            pairs = []
            for prompt, question in group:
                ending = self.tokenizer.encode(prompt.answer_prefix + question.outputs[0])
                pairs.append((self._fitting(prompt, question, self._longest - len(ending)), ending))
            for predicted in self._predicted(pairs):
                self.likelihoods.append(predicted.log_likelihood)
                yield self.tokenizer.decode(predicted.best).strip()

    def log_likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """``log P(second | first)`` for each pair of lists of ids; the first has at least one id."""
        return [predicted.log_likelihood for predicted in self._predicted(pairs)]

    @torch.inference_mode()
    def _predicted(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Predicted]:
        head: Any = self.model.get_submodule("lm_head")
        predicted: list[Predicted] = []
        features = [
            Feature(number, [Tokens([*first, *last[:-1]], [])], (len(first), last))
            for number, (first, last) in enumerate(pairs)
        ]
        for group in by_budget(features, self.tokens_per_batch):
            batch = collate(group, segments=False).to(self._device)
            states = encode(self.model, batch).x
            starts = batch.cu_seqlens.tolist()
            rows: list[int] = []
            targets: list[int] = []
            sizes: list[int] = []
            for start, feature in zip(starts, group, strict=False):
                begin, ending = feature.target
                rows += range(start + begin - 1, start + begin - 1 + len(ending))
                targets += ending
                sizes.append(len(ending))
            logits: Tensor = (
                head(states[torch.tensor(rows, device=self._device, dtype=torch.int64)]).float().log_softmax(-1)
            )
            picked = logits.gather(1, torch.tensor(targets, device=self._device, dtype=torch.int64)[:, None]).squeeze(1)
            parts = zip(picked.cpu().split(sizes), logits.argmax(-1).cpu().split(sizes), strict=True)
            predicted += [Predicted(float(values.sum()), best.tolist()) for values, best in parts]
        return predicted


class Predicted(NamedTuple):
    """The log-likelihood of an ending, and the most likely token at each of its positions."""

    log_likelihood: float
    best: list[int]


# ---- scores ----------------------------------------------------------------------------------------------------------


def prompt_scores(
    metrics: Iterable[str],
    questions: Sequence[Question],
    answers: Sequence[str],
    likelihoods: Sequence[float] = (),
) -> Scores:
    """The scores with these names of ``METRICS``, from 0 to 1, BLEU from 0 to 100. The perplexity is that of the right
    answers, each as one word (LAMBADA): ``exp`` of minus the mean of their log-likelihoods."""
    scores: Scores = {}
    gold = [question.references or [question.outputs] for question in questions]
    for name in metrics:
        if name == "perplexity":
            if len(likelihoods) != len(questions):
                raise ValueError("metrics: expected --answer last-word for the perplexity, got another")
            scores[name] = math.exp(min(700.0, -sum(likelihoods) / len(likelihoods)))
        else:
            scores |= _SCORERS[name](gold, answers)
    return scores


def domain_scores(
    metrics: Iterable[str], questions: Sequence[Question], answers: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The scores of the questions of each domain, with their number; empty if there are not several domains (CoQA)."""
    domains = sorted({question.domain for question in questions})
    if len(domains) < 2:
        return {}
    domain_results: dict[str, dict[str, Any]] = {}
    for domain in domains:
        indices = [index for index, question in enumerate(questions) if question.domain == domain]
        scores = prompt_scores(metrics, [questions[index] for index in indices], [answers[index] for index in indices])
        domain_results[domain] = {"questions": len(indices), **scores}
    return domain_results


def check_metrics(metrics: Iterable[str]) -> None:
    """Raises ValueError for a name that is not in ``METRICS``, and ImportError for a package that is not installed."""
    needed = {"f1": scikit_learn, "bleu": _sacrebleu, "rouge": _rouge_scorer}
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"metrics: expected {', '.join(METRICS)}, got {name!r}")
        needed.get(name, lambda: None)()


Gold = Sequence[list[list[str]]]  # for each question lists of right answers


def _mean_over(name: str, score: Callable[[str, str], float]) -> Callable[[Gold, Sequence[str]], Scores]:
    """The mean over examples of the best score against any right answer, averaged over the lists of these."""

    def mean(gold: Gold, answers: Sequence[str]) -> Scores:
        means = [
            statistics.fmean(max(score(text, answer) for text in right) for right in lists)
            for lists, answer in zip(gold, answers, strict=True)
        ]
        return {name: sum(means) / len(means)}

    return mean


def _f1(gold: Gold, answers: Sequence[str]) -> Scores:
    scores = label_scores([lists[0][0] for lists in gold], list(answers))
    return {name: value for name, value in scores.items() if name == "f1"}


def _bleu(gold: Gold, answers: Sequence[str]) -> Scores:
    texts = _texts(gold)
    most = max(map(len, texts))
    references = [[right[number] if number < len(right) else None for right in texts] for number in range(most)]
    return {"bleu": float(_sacrebleu().corpus_bleu(list(answers), references).score)}


def _texts(gold: Gold) -> list[list[str]]:
    """All right answers of each question."""
    return [list(dict.fromkeys(itertools.chain(*lists))) for lists in gold]


def _rouge(gold: Gold, answers: Sequence[str]) -> Scores:
    kinds = ("rouge1", "rouge2", "rougeL")
    scorer = _rouge_scorer().RougeScorer(kinds, use_stemmer=True)
    scored = [scorer.score_multi(right, answer) for right, answer in zip(_texts(gold), answers, strict=True)]
    return {kind: sum(result[kind].fmeasure for result in scored) / len(scored) for kind in kinds}


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError:
        raise _extras.missing("BLEU", "sacrebleu", "prompts") from None
    return sacrebleu


def _rouge_scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise _extras.missing("ROUGE", "rouge-score", "prompts") from None
    return rouge_scorer


_SCORERS: dict[str, Callable[[Gold, Sequence[str]], Scores]] = {
    "accuracy": _mean_over("accuracy", lambda right, answer: float(right.strip() == answer.strip())),
    "f1": _f1,
    "exact_match": _mean_over("exact_match", exact_match),
    "answer_f1": _mean_over("answer_f1", answer_f1),
    "bleu": _bleu,
    "rouge": _rouge,
}


def lines_of(questions: Sequence[Question], answers: Sequence[str], **fields: Any) -> Iterator[str]:
    """Answers as lines of JSON."""
    for question, answer in zip(questions, answers, strict=True):
        row = {**fields, "input": question.input, "output": question.outputs, "answer": answer}
        yield json.dumps(row, ensure_ascii=False) + "\n"
