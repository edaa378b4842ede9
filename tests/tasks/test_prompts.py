"""Prompts with and without examples, stop strings, and text from a stream of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer_training import train_tokenizer
from fasttfm.tasks.prompts import Prompt, Shot, read_shots, text_pieces, until

SHOTS = [Shot("sea otter", "loutre de mer"), Shot("plush giraffe", "girafe peluche")]
ARROW = "{input} => {output}"


def test_zero_one_and_few_shots() -> None:
    task = "Translate English to French:"
    assert Prompt(task, template=ARROW, separator="\n").text("cheese") == "Translate English to French:\ncheese =>"
    assert Prompt(task, SHOTS[:1]).text("cheese") == (
        "Translate English to French:\n\nInput: sea otter\nOutput: loutre de mer\n\nInput: cheese\nOutput:"
    )
    assert Prompt("", SHOTS, ARROW, "\n").text("cheese") == (
        "sea otter => loutre de mer\nplush giraffe => girafe peluche\ncheese =>"
    )
    assert Prompt().text("Once upon a time ") == "Once upon a time "
    assert Prompt(template=ARROW).text("cheese") == "cheese =>"
    assert Prompt(template="{input}\nTL;DR:{output}").text("A long story.") == "A long story.\nTL;DR:"
    assert (Prompt(template=ARROW).answer_prefix, Prompt(template="{input}\n{output}").answer_prefix) == (" ", "")


def test_braces_in_texts_stay() -> None:
    assert Prompt("", [Shot("{output}", "{input}")], ARROW).text("{x}") == "{output} => {input}\n\n{x} =>"


@pytest.mark.parametrize("template", ["{input}", "{output} {input}", "{input} {input} {output}", "{input}: {output}!"])
def test_a_template_that_cannot_be_continued_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"template: expected \{input\} once and then \{output\}"):
        Prompt(template=template)


def test_the_first_examples_are_dropped_if_they_do_not_fit() -> None:
    prompt = Prompt("Translate:", SHOTS, ARROW, "\n")
    whole = len(prompt.text("cheese"))
    assert prompt.fitting("cheese", len, whole) == prompt
    assert prompt.fitting("cheese", len, whole - 1).shots == SHOTS[1:]
    assert prompt.fitting("cheese", len, 20).shots == []
    with pytest.raises(ValueError, match="expected no more than 19 tokens without examples, got 20"):
        prompt.fitting("cheese", len, 19)


def test_examples_are_read_from_lines(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text('{"input": "sea otter", "output": "loutre de mer"}\n\n{"input": "a", "output": "b", "x": 1}\n')
    assert read_shots(path) == [SHOTS[0], Shot("a", "b")]
    path.write_text('{"input": "a", "output": "b"}\n{"input": "a"}\n')
    with pytest.raises(DataError, match=r'examples.jsonl, line 2: expected an object with two texts, "input" and'):
        read_shots(path)
    path.write_text("sea otter\n")
    with pytest.raises(DataError, match=r"line 1: expected a JSON object"):
        read_shots(path)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("stop", "expected"), [("\n", "one two"), ("two\nt", "one "), ("", None), ("absent", None)])
def test_a_text_ends_at_the_stop_string(size: int, stop: str, expected: str | None) -> None:
    text = "one two\ntwo\nthree"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert "".join(until(iter(pieces), stop)) == (text if expected is None else expected)


def test_nothing_is_requested_after_the_stop() -> None:
    pieces = iter(["a", "b\n", "c"])
    assert "".join(until(pieces, "\n")) == "ab"
    assert next(pieces) == "c"


def test_only_a_possible_stop_string_is_held_back() -> None:
    assert list(until(iter(["a\n", "b", "c"]), "\n\n")) == ["a", "\nb", "c"]


def test_a_character_of_several_tokens_is_yielded_with_the_last() -> None:
    tokenizer = train_tokenizer("bpe", ["to be or not to be"], 280)
    text = "to be \u2013 \u00e4rger"
    ids = tokenizer.encode(text)
    pieces = list(text_pieces(tokenizer, iter(ids)))
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert 1 < len(pieces) < len(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    unfinished = tokenizer.encode("to be \u2013")[:-1]
    assert tokenizer.decode(unfinished).endswith("\ufffd")
    assert "".join(text_pieces(tokenizer, iter(unfinished))) == tokenizer.decode(unfinished)
