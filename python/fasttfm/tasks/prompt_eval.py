"""Zero-, one- and few-shot evaluation: prompts with labelled examples, answers by likelihood or generation, scores."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _extras
from fasttfm.data.lines import data_error, read_json_lines
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.generate import Generation
from fasttfm.generate.loop import session_of
from fasttfm.inference.opening import longest_input
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.distillation_recipes import encode
from fasttfm.tasks.inputs import Feature, Tokens, by_budget, collate
from fasttfm.tasks.metrics import Scores, answer_f1, exact_match, label_scores, scikit_learn
from fasttfm.tasks.prompts import Prompt, Shot, text_pieces, until

NORMALIZATIONS = ("none", "tokens", "bytes", "unconditional")
_SEQUENCES = 8  # generated at a time
METRICS = ("accuracy", "f1", "exact_match", "answer_f1", "bleu", "rouge")


class Question(NamedTuple):
    """A question with its right answers."""

    input: str
    outputs: list[str]  # the right answers; prompts show the first
    choices: list[str]  # the possible answers; empty if there is no such list


@dataclass(frozen=True)
class Preset:
    """The prompt format of a kind of task, from the papers."""

    template: str | None
    separator: str
    answer: str  # "likelihood" or "generate"
    metrics: tuple[str, ...]


# GPT-2's summaries and translations, GPT-3's reading comprehension.
PRESETS = {
    "classify": Preset(None, "\n\n", "likelihood", ("accuracy", "f1")),
    "choice": Preset(None, "\n\n", "likelihood", ("accuracy",)),
    "tldr": Preset("{input}\nTL;DR: {output}", "\n\n", "generate", ("rouge",)),
    "translate": Preset("{input} = {output}", "\n", "generate", ("bleu",)),
    "reading": Preset("{input}\nA: {output}", "\n\n", "generate", ("exact_match", "answer_f1")),
}


def read_questions(path: str | Path) -> list[Question]:
    """Reads a .jsonl file with one object per line: the texts ``input`` and ``output`` (or a list of right answers),
    and optionally ``choices``, a list of texts."""
    found = []
    for number, line, row in read_json_lines(Path(path)):
        row = row if isinstance(row, dict) else {}
        stated: Any = row.get("output")
        outputs: Any = [stated] if isinstance(stated, str) else stated
        choices: Any = row.get("choices", [])
        lists = isinstance(outputs, list) and outputs and isinstance(choices, list)
        if not lists or not all(isinstance(each, str) for each in [row.get("input"), *outputs, *choices]):
            expected = 'an object with the texts "input" and "output", and perhaps a list "choices"'
            raise data_error(path, expected, f"{line:.60}", line=number)
        if choices and outputs[0] not in choices:
            raise data_error(path, '"output" among "choices"', f"{outputs[0]:.60}", line=number)
        found.append(Question(row["input"], outputs, choices))
    if not found:
        raise data_error(path, "examples, one object per line", "none")
    return found


@dataclass
class Evaluation:
    """Answers of a causal LM to prompts.

    Args:
        model: A causal LM, on the device where it is to run.
        prompt: Description, template and separator; its examples are replaced by drawn ones.
        answer: ``"likelihood"`` to compare the choices, or ``"generate"``.
        normalization: How the log-likelihoods of choices are normalized: ``"none"``, by the number of ``"tokens"`` or
            ``"bytes"``, or by the ``"unconditional"`` probability after the end of the template (GPT-3).
        stop: The text at which a generated answer ends.
    """

    model: PretrainedModel
    tokenizer: Tokenizer
    prompt: Prompt
    answer: str = "likelihood"
    normalization: str = "tokens"
    max_new_tokens: int = 50
    stop: str = "\n"
    tokens_per_batch: int = 16384
    left_out: int = 0  # the number of examples that did not fit into prompts

    def __post_init__(self) -> None:
        if self.answer not in ("likelihood", "generate"):
            raise ValueError(f"answer: expected likelihood or generate, got {self.answer!r}")
        if self.normalization not in NORMALIZATIONS:
            expected = ", ".join(NORMALIZATIONS)
            raise ValueError(f"normalization: expected one of {expected}, got {self.normalization!r}")
        self.model.eval()
        self._longest = longest_input(self.model.config)
        self._device = next(self.model.parameters()).device

    def answers(self, questions: Sequence[Question], shots: Sequence[Question], k: int, seed: int) -> Iterator[str]:
        """Yields an answer to each question, after a prompt with ``k`` of the ``shots``, drawn for each question with
        the seed. A question's own example is never drawn."""
        labels = list(dict.fromkeys(each.outputs[0] for each in (shots or questions)))
        prompts = self._prompts(questions, shots, k, seed)
        if self.answer == "generate":
            yield from self._generated(prompts)
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
        fitting = prompt.fitting(question.input, lambda text: len(self.tokenizer.encode(text)), room)
        self.left_out += len(prompt.shots) - len(fitting.shots)
        return self.tokenizer.encode(fitting.text(question.input))

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

    @torch.inference_mode()
    def log_likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """``log P(second | first)`` for each pair of lists of ids; the first has at least one id."""
        head: Any = self.model.get_submodule("lm_head")
        found: list[float] = []
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
            found += [float(part.sum()) for part in picked.cpu().split(sizes)]
        return found


# ---- scores ----------------------------------------------------------------------------------------------------------


def prompt_scores(metrics: Iterable[str], questions: Sequence[Question], answers: Sequence[str]) -> Scores:
    """The scores with these names of ``METRICS``, from 0 to 1, BLEU from 0 to 100."""
    scores: Scores = {}
    gold = [question.outputs for question in questions]
    for name in metrics:
        scores |= _SCORERS[name](gold, answers)
    return scores


def check_metrics(metrics: Iterable[str]) -> None:
    """Raises ValueError for a name that is not in ``METRICS``, and ImportError for a package that is not installed."""
    needed = {"f1": scikit_learn, "bleu": _sacrebleu, "rouge": _rouge_scorer}
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"metrics: expected {', '.join(METRICS)}, got {name!r}")
        needed.get(name, lambda: None)()


def _each(name: str, score: Callable[[str, str], float]) -> Callable[[Sequence[list[str]], Sequence[str]], Scores]:
    """The mean over examples of the best score against any right answer."""

    def mean(gold: Sequence[list[str]], answers: Sequence[str]) -> Scores:
        found = [max(score(each, answer) for each in right) for right, answer in zip(gold, answers, strict=True)]
        return {name: sum(found) / len(found)}

    return mean


def _f1(gold: Sequence[list[str]], answers: Sequence[str]) -> Scores:
    found = label_scores([right[0] for right in gold], list(answers))
    return {name: value for name, value in found.items() if name == "f1"}


def _bleu(gold: Sequence[list[str]], answers: Sequence[str]) -> Scores:
    most = max(map(len, gold))
    references = [[right[number] if number < len(right) else None for right in gold] for number in range(most)]
    return {"bleu": float(_sacrebleu().corpus_bleu(list(answers), references).score)}


def _rouge(gold: Sequence[list[str]], answers: Sequence[str]) -> Scores:
    kinds = ("rouge1", "rouge2", "rougeL")
    scorer = _rouge_scorer().RougeScorer(kinds, use_stemmer=True)
    scored = [scorer.score_multi(right, answer) for right, answer in zip(gold, answers, strict=True)]
    return {kind: sum(each[kind].fmeasure for each in scored) / len(scored) for kind in kinds}


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


_SCORERS: dict[str, Callable[[Sequence[list[str]], Sequence[str]], Scores]] = {
    "accuracy": _each("accuracy", lambda right, answer: float(right.strip() == answer.strip())),
    "f1": _f1,
    "exact_match": _each("exact_match", exact_match),
    "answer_f1": _each("answer_f1", answer_f1),
    "bleu": _bleu,
    "rouge": _rouge,
}


def lines_of(questions: Sequence[Question], answers: Sequence[str], **fields: Any) -> Iterator[str]:
    """Answers as lines of JSON."""
    for question, answer in zip(questions, answers, strict=True):
        row = {**fields, "input": question.input, "output": question.outputs, "answer": answer}
        yield json.dumps(row, ensure_ascii=False) + "\n"
