"""Scores of predictions: labels and values by scikit-learn and SciPy, entities and answers by the definitions of their
shared tasks. Scores range from 0 to 1 (correlations from -1); larger is better."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fasttfm import _extras

Scores = dict[str, float]


# ---- labels and values -----------------------------------------------------------------------------------------------


def label_scores(gold: Sequence[Any], predicted: Sequence[Any]) -> Scores:
    """Accuracy, macro F1, and Matthews correlation."""
    metrics = scikit_learn()
    return {
        "accuracy": float(metrics.accuracy_score(gold, predicted)),
        "f1": float(metrics.f1_score(gold, predicted, average="macro", zero_division=0.0)),
        "matthews": float(metrics.matthews_corrcoef(gold, predicted)) if len({*gold, *predicted}) > 1 else 0.0,
    }


def value_scores(gold: Sequence[float], predicted: Sequence[float]) -> Scores:
    """Pearson and Spearman correlation; 0 if either side is constant, where they are undefined."""
    scikit_learn()
    from scipy.stats import pearsonr, spearmanr

    if len(set(gold)) < 2 or len(set(predicted)) < 2:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(pearsonr(gold, predicted).statistic),
        "spearman": float(spearmanr(gold, predicted).statistic),
    }


def most_common(values: Iterable[Any]) -> Any:
    """The most frequent value, the first of several: the prediction of a majority baseline."""
    return Counter(values).most_common(1)[0][0]


def scikit_learn() -> Any:
    """``sklearn.metrics``"""
    try:
        from sklearn import metrics
    except ImportError:
        raise _extras.missing("computing scores", "scikit-learn", "tasks") from None
    return metrics


# ---- entities --------------------------------------------------------------------------------------------------------

_SCHEME = re.compile(r"O|[BIES]-.+")


def tag_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """Accuracy of the words' tags. If the tags mark entities (B-, I-, perhaps E- and S-), also precision, recall and F1
    of entities, as in CoNLL's shared tasks: kind, first and last word must all be right."""
    pairs = [pair for tags, others in zip(gold, predicted, strict=True) for pair in zip(tags, others, strict=True)]
    scores = {"accuracy": sum(a == b for a, b in pairs) / max(1, len(pairs))}
    if not all(_SCHEME.fullmatch(tag) for pair in pairs for tag in pair):
        return scores
    right = gold_count = predicted_count = 0
    for tags, others in zip(gold, predicted, strict=True):
        ours, theirs = entities(tags), entities(others)
        right += len(ours & theirs)
        gold_count += len(ours)
        predicted_count += len(theirs)
    return {
        **scores,
        "precision": right / max(1, predicted_count),
        "recall": right / max(1, gold_count),
        "f1": 2 * right / max(1, gold_count + predicted_count),
    }


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, first word and end of every entity in a sentence. An I- or E- without a predecessor starts an entity."""
    entities = set()
    start, kind, closed = None, "", False
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if start is not None and (closed or prefix not in ("I", "E") or name != kind):
            entities.add((kind, start, index))
            start = None
        if prefix != "O" and start is None:
            start, kind = index, name
        closed = prefix in ("E", "S")
    return entities


# ---- types of entities -----------------------------------------------------------------------------------------------


def type_scores(gold: Sequence[Collection[str]], predicted: Sequence[Collection[str]]) -> Scores:
    """Strict accuracy (the predicted types are exactly the right ones), and the loose F1 of Ling and Weld: macro, from
    the means of each entity's precision and recall, and micro, over all types together."""
    pairs = [(set(ours), set(theirs)) for ours, theirs in zip(gold, predicted, strict=True)]
    count = max(1, len(pairs))
    right, gold_count, predicted_count = (
        sum(map(len, sets)) for sets in ((a & b for a, b in pairs), (a for a, _ in pairs), (b for _, b in pairs))
    )
    precision = sum(len(a & b) / len(b) for a, b in pairs if b) / count
    recall = sum(len(a & b) / len(a) for a, b in pairs if a) / count
    return {
        "accuracy": sum(a == b for a, b in pairs) / count,
        "macro_f1": 2 * precision * recall / max(precision + recall, 1e-12),
        "micro_f1": 2 * right / max(1, gold_count + predicted_count),
    }


# ---- answers to questions (SQuAD, KorQuAD) ---------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_QUOTES = str.maketrans(dict.fromkeys("'\"\u300a\u300b<>\u3008\u3009()\u2018\u2019", " "))


def normalized(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def normalized_korean(answer: str) -> str:
    """An answer as KorQuAD compares it: lower case, spaces for quotation marks and brackets, no other punctuation."""
    return " ".join(answer.translate(_QUOTES).lower().translate(_PUNCTUATION).split())


def _characters(text: str) -> list[str]:
    return list("".join(text.split()))


class AnswerRules(NamedTuple):
    """How answers are compared."""

    normalized: Callable[[str], str]
    units: Callable[[str], list[str]]  # of a normalized answer: F1 counts those that two answers have in common


# SQuAD's evaluation counts words. KorQuAD's counts characters, because particles belong to the words of Korean.
ANSWER_RULES = {"squad": AnswerRules(normalized, str.split), "korquad": AnswerRules(normalized_korean, _characters)}
SQUAD = ANSWER_RULES["squad"]


def exact_match(gold: str, answer: str, rules: AnswerRules = SQUAD) -> float:
    return float(rules.normalized(gold) == rules.normalized(answer))


def answer_f1(gold: str, answer: str, rules: AnswerRules = SQUAD) -> float:
    """F1 of the common units, counted with multiplicity; if either answer is empty, whether both are."""
    gold_units, answer_units = (rules.units(rules.normalized(text)) for text in (gold, answer))
    if not gold_units or not answer_units:
        return float(gold_units == answer_units)
    common = sum((Counter(gold_units) & Counter(answer_units)).values())
    return 2 * common / (len(gold_units) + len(answer_units))


Gold = Sequence[str] | Sequence[Sequence[str]]


def answer_scores(gold: Mapping[Any, Gold], answers: Mapping[Any, str], rules: AnswerRules = SQUAD) -> Scores:
    """Exact match and F1: means over all questions and, if both kinds exist, over those with and without an answer.

    Args:
        gold: The right answers of every question by its id or number; an empty list if it has no answer (SQuAD 2.0). If
            there are several lists of answers, the score is the mean over the lists (CoQA).
        answers: One answer for each id, empty for none.
        rules: How answers are compared.
    """
    exact, f1 = (_best(gold, answers, partial(score, rules=rules), rules) for score in (exact_match, answer_f1))
    scores = {"exact": _mean(exact, gold), "f1": _mean(f1, gold)}
    kinds = {
        "answerable": [key for key in gold if _answerable(gold[key], rules)],
        "unanswerable": [key for key in gold if not _answerable(gold[key], rules)],
    }
    if all(kinds.values()):
        for kind, keys in kinds.items():
            scores |= {f"{kind}_exact": _mean(exact, keys), f"{kind}_f1": _mean(f1, keys)}
    return scores


def best_threshold(
    gold: Mapping[Any, Gold], answers: Mapping[Any, str], no_answer: Mapping[Any, float], rules: AnswerRules = SQUAD
) -> float:
    """The threshold of ``no_answer`` above which a question counts as unanswered, chosen to maximize F1 (SQuAD's
    ``best_f1_thresh``). Tune it on other questions than those that are scored.

    Args:
        gold: As in ``answer_scores``.
        answers: The best nonempty answer of each question.
        no_answer: The score of "no answer" minus the score of that answer.
        rules: How answers are compared.
    """
    score_of = partial(answer_f1, rules=rules)
    f1, none = (_best(gold, texts, score_of, rules) for texts in (answers, dict.fromkeys(gold, "")))
    order = sorted(gold, key=lambda key: no_answer[key])
    score = best = sum(none.values())  # with no question answered
    threshold = min(no_answer.values(), default=0.0) - 1
    for index, key in enumerate(order):
        score += f1[key] - none[key]
        last_of_equals = index + 1 == len(order) or no_answer[key] < no_answer[order[index + 1]]
        if score > best and last_of_equals:
            best, threshold = score, no_answer[key]
    return float(threshold)


def _lists(right: Gold, rules: AnswerRules) -> list[list[str]]:
    """The lists of right answers, with an empty answer if there is none. SQuAD ignores answers that are empty after
    normalization, unless there are no others."""
    lists = [list(text) for text in right if not isinstance(text, str)]
    texts = [text for text in right if isinstance(text, str) and rules.normalized(text)]
    return lists or [texts or [""]]


def _answerable(right: Gold, rules: AnswerRules) -> bool:
    return any(rules.normalized(answer) for answers in _lists(right, rules) for answer in answers)


def _best(gold: Mapping[Any, Gold], answers: Mapping[Any, str], score: Any, rules: AnswerRules) -> dict[Any, float]:
    """Each question's best score over its right answers."""
    if missing := [key for key in gold if key not in answers]:
        raise ValueError(f"answer_scores: answers: expected one for every question, got none for {missing[0]!r}")

    def of(right: Gold, answer: str) -> float:
        lists = _lists(right, rules)
        return sum(max(score(text, answer) for text in answers) for answers in lists) / len(lists)

    return {key: of(right, answers[key]) for key, right in gold.items()}


def _mean(scores: Mapping[Any, float], keys: Iterable[Any]) -> float:
    values = [scores[key] for key in keys]
    return sum(values) / max(1, len(values))
