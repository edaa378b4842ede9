"""TinyBERT's data augmentation: which words are replaced, and by which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fasttfm.data.lines import DataError
from fasttfm.data.task_files import TagExample, TextExample
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.inference.opening import base_of, open_model
from fasttfm.models.family import Head
from fasttfm.tasks.augmentation import Augmenter

TEXT = "The Congress of 1801 met, and zyxomatic peace came."


@pytest.fixture
def augmenter(bert_directory: Path) -> Augmenter:
    model = open_model(bert_directory, Head.MASKED_LM)
    return Augmenter(model, load_tokenizer(bert_directory), copies=3, candidates=4, probability=0.5, seed=1)


def words(text: str) -> list[tuple[int, int]]:
    return [(text.index(word), text.index(word) + len(word)) for word in ("Congress", "zyxomatic", "peace")]


def test_a_word_of_one_token_gets_what_the_model_predicts(augmenter: Augmenter) -> None:
    proposed = augmenter.proposals(TEXT, words(TEXT))
    tokenizer, model = augmenter.tokenizer, augmenter.model
    ids = tokenizer.encode(TEXT)
    index = ids.index(tokenizer.encode("congress")[0])
    special = tokenizer.special
    masked = torch.tensor([[special.cls, *ids[:index], special.mask, *ids[index + 1 :], special.sep]])
    with torch.no_grad():
        order = model(masked).logits[0, index + 1].argsort(descending=True).tolist()
    expected = [tokenizer.decode([id]) for id in order if id in augmenter._words][:4]
    assert proposed[0] == expected
    assert [len(some) for some in proposed] == [4, 4, 4]


def test_a_word_of_several_tokens_gets_its_nearest_words(augmenter: Augmenter) -> None:
    proposals = augmenter.proposals(TEXT, words(TEXT))[1]
    ids = augmenter.tokenizer.encode("zyxomatic")
    assert len(ids) > 1
    table = base_of(augmenter.model).embeddings.word.weight.detach()
    mean = table[ids].mean(0)
    scores = {id: float(torch.cosine_similarity(table[id], mean, dim=0)) for id in augmenter._words}
    best = sorted(scores, key=lambda id: -scores[id])[:4]
    assert proposals == [augmenter._words[id] for id in best]


def test_copies_keep_everything_but_words(augmenter: Augmenter) -> None:
    copies = augmenter.texts(TEXT)
    assert len(copies) == 3
    assert all(" 1801 " in copy and ", " in copy and copy.endswith(".") for copy in copies)
    assert any(copy != TEXT for copy in copies)
    augmenter.probability = 0.0
    assert augmenter.texts(TEXT) == [TEXT] * 3
    assert augmenter.texts("1801!") == ["1801!"] * 3


def test_examples_are_followed_by_their_augmentations(augmenter: Augmenter) -> None:
    examples = [TextExample("peace and war", None, "a"), TextExample("one thing", "other thing", "b")]
    augmented = augmenter.augmented(examples)
    assert [example.label for example in augmented] == ["a"] * 4 + ["b"] * 4
    assert augmented[0] is examples[0]
    assert all(example.second is None for example in augmented[:4])
    assert all(example.second is not None for example in augmented[4:])
    with pytest.raises(DataError, match="augmentation: expected texts or pairs of texts, got TagExample"):
        augmenter.augmented([TagExample(["a"], ["O"])])


def test_the_seed_determines_the_result(bert_directory: Path) -> None:
    def copies(seed: int) -> list[str]:
        model = open_model(bert_directory, Head.MASKED_LM)
        return Augmenter(model, load_tokenizer(bert_directory), copies=4, seed=seed).texts(TEXT)

    assert copies(0) == copies(0) != copies(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": 0}, "copies: expected"),
        ({"candidates": 0}, "candidates: expected"),
        ({"probability": 2}, "in \\[0, 1\\]"),
    ],
)
def test_bad_options(bert_directory: Path, options: dict[str, int], message: str) -> None:
    model = open_model(bert_directory, Head.MASKED_LM)
    with pytest.raises(ValueError, match=message):
        Augmenter(model, load_tokenizer(bert_directory), **options)
