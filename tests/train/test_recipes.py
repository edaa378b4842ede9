"""The recipes of papers: complete tables, and numbers that are fitted to the size of a corpus."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fasttfm.cli import pretrain as command
from fasttfm.models.families import trained_on_text
from fasttfm.train.recipes import RECIPES, Recipe, described, estimated_tokens, fitted, settings_of, steps_of

BERT = RECIPES["bert"]["base"]


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["pretrain", "--device", "cpu", "--output", "x", *given])


def settings(*given: str) -> Any:
    return command._settings(parsed(*given))[0]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the corpus had a billion tokens."""
    monkeypatch.setattr("fasttfm.train.recipes.estimated_tokens", lambda source: 1_000_000_000)


def test_every_size_of_every_family_has_a_recipe() -> None:
    assert {name: set(sizes) for name, sizes in RECIPES.items()} == {
        name: set(family.sizes) for name, family in trained_on_text().items()
    }
    for family, sizes in RECIPES.items():
        config = trained_on_text()[family].config()
        for recipe in sizes.values():
            assert recipe.max_length <= getattr(config, trained_on_text()[family].positions)
            assert recipe.vocabulary == config.vocab_size
            assert (recipe.steps is None) != (recipe.epochs is None)


@pytest.mark.parametrize("tokens", [0, 700_000])
@pytest.mark.parametrize("recipe", [pytest.param(RECIPES[name]["tiny"], id=name) for name in RECIPES])
def test_little_text_has_small_numbers(recipe: Recipe, tokens: int) -> None:
    found = fitted(recipe, tokens, {})
    assert (found.vocabulary, found.max_length, found.tokens_per_step) == (4000, 128, 2048)
    assert (found.first_length, found.optimizer, found.learning_rate) == (None, "adamw", 1e-3)


@pytest.mark.parametrize(
    "recipe", [pytest.param(each["base"], id=name) for name, each in RECIPES.items() if "base" in each]
)
def test_enough_text_has_the_numbers_of_the_paper(recipe: Recipe) -> None:
    assert fitted(recipe, 10**10, {}) == recipe


def test_numbers_grow_with_the_corpus() -> None:
    found = [fitted(RECIPES["roberta"]["base"], 10**size, {}) for size in range(5, 11)]
    for name in ("vocabulary", "max_length", "tokens_per_step", "learning_rate"):
        values = [getattr(each, name) for each in found]
        assert values == sorted(values), name
        assert len(set(values)) > 1, name


def test_given_numbers_are_kept() -> None:
    found = fitted(BERT, 10**10, {"tokens_per_step": 256})
    assert found.max_length == 256  # a batch has room for a sequence
    assert fitted(BERT, 10**10, {"tokens_per_step": 256}, parts=4).max_length == 64
    found = fitted(BERT, 10**10, {"max_length": 512})
    assert (found.max_length, found.first_length) == (512, None)


def test_the_command_has_berts_phases(large: None) -> None:
    found = settings("bert", "--size", "base", "--steps", "1000")
    assert (found.max_length, found.first_length, found.first_steps) == (512, 128, 900)
    assert (found.tokens_per_step, found.batches_per_step, found.vocabulary) == (131_072, 16, 30_522)
    assert (found.schedule.warmup, found.optimizer.learning_rate) == (100, 1e-4)
    assert settings("bert", "--cuda-graph").first_length is None
    assert settings("bert", "--max-length", "512").first_length is None
    found = settings("bert", "--max-length", "256", "--first-length", "64", "--steps", "50")
    assert (found.max_length, found.first_length, found.first_steps) == (256, 64, 45)
    assert settings("bert", "--first-length", "64", "--first-steps", "3").first_steps == 3


def test_a_pinned_recipe_is_not_scaled() -> None:
    """Also on the shipped text, and with the paper's number of steps; options have priority."""
    found = settings("albert", "--size", "base", "--recipe", "paper")
    assert (found.schedule.steps, found.schedule.warmup) == (125_000, 3125)
    assert (found.optimizer.name, found.optimizer.learning_rate) == ("lamb", 1.76e-3)
    assert (found.tokens_per_step, found.max_length, found.vocabulary) == (4096 * 512, 512, 30_000)
    assert (found.whole_word, found.ngram) == (True, 3)
    found = settings("albert", "--recipe", "paper", "--steps", "20", "--no-whole-word", "--optimizer", "adamw")
    assert (found.schedule.steps, found.schedule.warmup, found.optimizer.name) == (20, 2, "adamw")
    assert not found.whole_word


def test_epochs_become_steps() -> None:
    gpt = RECIPES["gpt"]["base"]
    assert steps_of(gpt, 1_000_000) == 100 * 1_000_000 // (64 * 512)
    assert steps_of(BERT, 1_000_000) == 1_000_000


def test_the_numbers_are_printed_next_to_the_papers() -> None:
    options: dict[str, Any] = {"steps": 400, "processes": 1, "largest": 8192, "precision": "float32"}
    text = described(BERT, settings_of("bert", "base", fitted(BERT, 700_000, {}), **options), 700_000)
    assert text.startswith("recipe of BERT (Devlin et al., 2018), on about 0.7 million tokens of text\n")
    assert "vocabulary                     4,000      paper: 30,522\n" in text
    assert "of the first 360 steps         the same   paper: 128\n" in text
    text = described(BERT, settings_of("bert", "base", BERT, **{**options, "steps": 1_000_000}), 10**10)
    assert "paper:" not in text


def test_batches_have_a_limited_size() -> None:
    found = settings_of("bert", "base", BERT, steps=10, processes=8, largest=1024, precision="float32")
    assert found.batches_per_step == 128  # of 8 processes: 131,072 / 1024
    found = settings_of("bert", "base", BERT, steps=10, processes=8, largest=64, precision="float32")
    assert found.batches_per_step == 256  # one sequence of 512 tokens each


def test_tokens_are_estimated_by_the_sizes_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 4500)
    (tmp_path / "b.txt.gz").write_bytes(b"x" * 1500)
    assert estimated_tokens(tmp_path) == 2000


def test_a_recipe_is_for_new_models(tmp_path: Path) -> None:
    for given in (["--resume"], ["--init", "bert"]):
        with pytest.raises(ValueError, match="expected without"):
            settings("--recipe", "paper", *given)
    assert dataclasses.asdict(settings("gpt3"))["schedule"]["kind"] == "cosine"
