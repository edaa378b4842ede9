"""Windows over long contexts, spans, and SQuAD's scores against values computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fasttfm.data.question_files import read_questions
from fasttfm.data.task_files import Answer as RightAnswer
from fasttfm.data.task_files import QuestionExample
from fasttfm.tasks.answers import Window, Windows, best_of_windows, best_span, span_of_characters, window_answer
from fasttfm.tasks.finetuning import prepare
from fasttfm.tasks.inputs import Format, Tokens
from fasttfm.tasks.metrics import ANSWER_RULES, answer_f1, answer_scores, best_threshold, exact_match, normalized
from fasttfm.tasks.questions import Answer

CLS, SEP = 101, 102
BERT = Format([CLS], [SEP], [SEP], max_length=12)


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_a_short_context_is_one_window() -> None:
    (window,) = Windows(BERT, stride=2, max_question=2).split([1, 2], [11, 12, 13])
    assert window.tokens == Tokens([CLS, 1, 2, SEP, 11, 12, 13, SEP], [0, 0, 0, 0, 1, 1, 1, 1])
    assert (window.first, window.start, window.size) == (4, 0, 3)


def test_windows_overlap_and_cover_every_token() -> None:
    context = list(range(11, 28))
    windows = Windows(BERT, stride=3, max_question=2).split([1, 2, 3, 4], context)
    assert [window.start for window in windows] == [0, 3, 6, 9, 12]  # 7 tokens each: the last ends with the context
    assert all(len(window.tokens.ids) <= 12 and window.tokens.ids[1:3] == [1, 2] for window in windows)
    for window in windows:
        inside = window.tokens.ids[window.first : window.first + window.size]
        assert inside == context[window.start : window.start + window.size]
    assert windows[-1].start + windows[-1].size == len(context)


def test_a_context_that_just_fits_has_no_second_window() -> None:
    assert len(Windows(BERT, stride=3, max_question=2).split([1, 2], list(range(7)))) == 1
    assert len(Windows(BERT, stride=3, max_question=2).split([1, 2], list(range(8)))) == 2
    assert len(Windows(BERT, stride=3, max_question=2).split([1, 2], [])) == 1


def test_a_span_is_placed_in_windows_that_have_all_of_it() -> None:
    windows = Windows(BERT, stride=3, max_question=2).split([1, 2], list(range(11, 28)))
    assert [window.positions_of((6, 8)) for window in windows] == [(0, 0), (7, 9), (4, 6), (0, 0), (0, 0)]
    assert {window.positions_of(None) for window in windows} == {(0, 0)}
    first, last = windows[1].positions_of((6, 8))
    assert windows[1].tokens.ids[first : last + 1] == [17, 18, 19]


@pytest.mark.parametrize("stride", [0, 8])
def test_a_stride_that_would_miss_tokens_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=f"stride: expected 1 to 7, .* got {stride}"):
        Windows(BERT, stride=stride, max_question=2)


def test_characters_become_tokens() -> None:
    offsets = [(0, 3), (4, 9), (9, 11), (12, 15)]
    assert span_of_characters(offsets, 4, 11) == (1, 2)
    assert span_of_characters(offsets, 5, 7) == (1, 1)  # inside a token
    assert span_of_characters(offsets, 3, 4) is None  # a space
    assert span_of_characters(offsets, 0, 15) == (0, 3)


# ---- spans -----------------------------------------------------------------------------------------------------------


def window_of(first: int, start: int, size: int) -> Window:
    return Window(Tokens([0] * (first + size + 1), [0] * (first + size + 1)), first, start, size)


def searched(window: Window, start: np.ndarray, end: np.ndarray, longest: int) -> tuple[int, int, float]:
    """The best span by exhaustive search."""
    inside = range(window.first, window.first + window.size)
    spans = [(i, j, float(start[i] + end[j])) for i in inside for j in inside if i <= j < i + longest]
    i, j, score = max(spans, key=lambda span: span[2])
    shift = window.start - window.first
    return i + shift, j + shift, score


@pytest.mark.parametrize("longest", [1, 3, 30])
def test_the_best_span_is_the_best_of_all(longest: int) -> None:
    generator = np.random.default_rng(longest)
    for _ in range(50):
        window = window_of(3, 5, int(generator.integers(1, 12)))
        start, end = generator.normal(size=(2, window.first + window.size + 1))
        assert best_span(window, start, end, longest) == searched(window, start, end, longest)


def test_no_span_ends_before_it_starts_or_leaves_the_context() -> None:
    start = np.array([9.0, 9.0, 0.0, 1.0, 5.0, 9.0])
    end = np.array([9.0, 9.0, 5.0, 1.0, 0.0, 9.0])
    # Start 5.0 at token 4 and end 5.0 at token 2 would be the largest sum; question and last token are outside.
    assert best_span(window_of(2, 0, 3), start, end, 30) == (0, 0, 5.0)


def test_windows_share_one_answer() -> None:
    windows = [window_of(1, 0, 3), window_of(1, 2, 3)]
    one = (np.array([2.0, 0, 0, 0, 0]), np.array([1.0, 0, 0, 0.5, 0]))
    two = (np.array([-1.0, 0, 4.0, 0, 0]), np.array([0.5, 0, 0, 3.0, 0]))
    best = best_of_windows([window_answer(*row, 30) for row in ((windows[0], *one), (windows[1], *two))])
    assert best.span == (3, 4, 7.0)  # in the second window, by the context's numbers
    assert best.none == -0.5  # the smaller of 3.0 and -0.5
    assert best.no_answer == -7.5


# ---- KorQuAD's definitions -------------------------------------------------------------------------------------------


def test_korean_answers_are_compared_by_characters() -> None:
    """By hand, after KorQuAD 1.0's evaluation."""
    rules = ANSWER_RULES["korquad"]
    assert rules.normalized("《충무공  이순신》(李舜臣), a \u2018장군\u2019.") == "충무공 이순신 李舜臣 a 장군"
    assert exact_match("이순신", "\u2018이순신\u2019", rules) == 1.0
    assert exact_match("이순신 장군", "이순신장군", rules) == 0.0  # spaces count for the exact match
    assert answer_f1("이순신 장군", "이순신장군", rules) == 1.0  # and not for F1
    assert answer_f1("이순신", "이순신은", rules) == pytest.approx(2 * 3 / (3 + 4))  # the words differ
    assert answer_f1("이순신", "이순신은") == 0.0
    assert answer_f1("1592년 4월", "1592년", rules) == pytest.approx(2 * 5 / (7 + 5))
    assert answer_f1("세종", "정조", rules) == 0.0


def test_korean_questions_are_scored_as_korquad(bert_directory: Path, tmp_path: Path) -> None:
    context = "이순신은 1592년에 한산도에서 싸웠다."
    qas = [{"id": "1", "question": "누가 싸웠는가?", "answers": [{"answer_start": 0, "text": "이순신"}]}]
    root = {
        "version": "KorQuAD_v1.0_dev",
        "data": [{"paragraphs": [{"context": context, "qas": qas}], "title": "한산도"}],
    }
    (tmp_path / "dev.json").write_text(json.dumps(root, ensure_ascii=False))
    examples = read_questions(tmp_path / "dev.json")
    answers = [Answer("이순신은", -9.0)]
    for score, f1 in ((None, 6 / 7), ("korquad", 6 / 7), ("squad", 0.0)):
        _, task = prepare("qa", bert_directory, examples, max_length=64, answer_score=score)
        assert task.scores(examples, answers) == pytest.approx({"exact": 0.0, "f1": f1})
    english = [QuestionExample("2", "Who?", "The king.", [RightAnswer("king", 4)], False)]
    _, task = prepare("qa", bert_directory, examples, max_length=64)
    assert task.scores(english, [Answer("kings", -9.0)])["f1"] == 0.0
    with pytest.raises(ValueError, match="answer_score: expected one of squad, korquad, got 'words'"):
        prepare("qa", bert_directory, examples, answer_score="words")


# ---- SQuAD's definitions ---------------------------------------------------------------------------------------------


def test_answers_are_compared_without_case_articles_and_punctuation() -> None:
    assert normalized("The  Duke of York's, a man!") == "duke of yorks man"
    assert normalized("Anthem of an Ant") == "anthem of ant"  # only whole words are articles
    assert exact_match("the King", "King.") == 1.0
    assert exact_match("the King", "Kings") == 0.0


def test_f1_counts_common_words() -> None:
    assert answer_f1("to be or not to be", "to be") == pytest.approx(2 * (2 / 2 * 2 / 6) / (2 / 2 + 2 / 6))
    assert answer_f1("to be or not to be", "be be be") == pytest.approx(2 * (2 / 3 * 2 / 6) / (2 / 3 + 2 / 6))
    assert answer_f1("the king", "a queen") == 0.0
    assert answer_f1("", "") == 1.0
    assert answer_f1("", "king") == answer_f1("king", "the") == 0.0


def test_scores_are_means_over_the_nearest_answers() -> None:
    gold = {"a": ["New York", "New York City"], "b": ["blue"], "c": []}
    scores = answer_scores(gold, {"a": "the New York City", "b": "dark blue", "c": "x"})
    assert scores["exact"] == pytest.approx(1 / 3)
    assert scores["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert scores["answerable_exact"] == 0.5
    assert scores["answerable_f1"] == pytest.approx((1 + 2 / 3) / 2)
    assert scores["unanswerable_exact"] == scores["unanswerable_f1"] == 0.0
    assert answer_scores(gold, {"a": "", "b": "", "c": ""})["exact"] == pytest.approx(1 / 3)
    assert set(answer_scores({"b": ["blue"]}, {"b": "Blue"})) == {"exact", "f1"}
    with pytest.raises(ValueError, match="none for 'b'"):
        answer_scores(gold, {"a": ""})


def test_several_lists_of_answers_are_averaged() -> None:
    """CoQA: each person's answers are left out in turn, and the closest of the others' counts."""
    gold = {"a": [["in a barn", "barn"], ["the barn", "barn"], ["the barn", "in a barn"]], "b": [["yes"], [""]]}
    scores = answer_scores(gold, {"a": "barn", "b": ""})
    assert scores["exact"] == pytest.approx((1 + 1 / 2) / 2)  # "the barn" is "barn"
    assert answer_scores(gold, {"a": "in barn", "b": "yes"})["f1"] == pytest.approx((8 / 9 + 1 / 2) / 2)
    assert set(scores) == {"exact", "f1"}  # somebody answered b
    # Without an answer b scores 1/2, as with a correct one; with a wrong one it scores 0.
    assert best_threshold(gold, {"a": "barn", "b": "no"}, {"a": 0.0, "b": 1.0}) == 0.0


def f1_at(threshold: float, gold: dict, answers: dict, no_answer: dict) -> float:
    kept = {key: "" if no_answer[key] > threshold else answer for key, answer in answers.items()}
    return answer_scores(gold, kept)["f1"]


def test_the_threshold_is_optimal() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        keys = [str(index) for index in range(int(generator.integers(1, 9)))]
        gold = {key: ["yes"] if generator.random() < 0.6 else [] for key in keys}
        answers = {key: ("yes", "no", "yes and no")[int(generator.integers(3))] for key in keys}
        no_answer = {key: float(generator.integers(-3, 4)) for key in keys}
        threshold = best_threshold(gold, answers, no_answer)
        best = max(f1_at(threshold, gold, answers, no_answer) for threshold in np.arange(-4.5, 5))
        assert f1_at(threshold, gold, answers, no_answer) == pytest.approx(best)


def test_the_threshold_by_hand() -> None:
    gold = {"a": ["yes"], "b": ["yes"], "c": [], "d": ["yes"]}
    answers = dict.fromkeys(gold, "yes")
    assert best_threshold(gold, answers, {"a": -3.0, "b": -2.0, "c": 1.0, "d": 4.0}) == -2.0  # 3 of 4 right
