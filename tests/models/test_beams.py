"""Beam search against that of transformers, and against an exhaustive search."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from fasttfm import models
from fasttfm.generate import generate

V, PAD = 23, 22
SIZES = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 24, "pad_token_id": PAD}
LENGTHS = [4, 2, 5]
BEFORE = torch.arange(5) >= 5 - torch.tensor(LENGTHS)[:, None]
PROMPTS = torch.randint(5, PAD, (3, 5), generator=torch.Generator().manual_seed(0)).where(BEFORE, PAD)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    made = models.GPT2LMHeadModel(models.GPT2Config(**SIZES, eos_token_id=3)).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return made


@pytest.fixture(scope="module")
def theirs(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("gpt")
    model.save_pretrained(directory)
    return transformers.GPT2LMHeadModel.from_pretrained(directory)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0},
        {"num_beams": 3, "early_stopping": True, "eos_token_id": [3, 7, 9]},
        {"num_beams": 2, "early_stopping": "never", "length_penalty": 0.5},
        {"num_beams": 3, "length_penalty": -1.0, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_the_same_sequences_as_transformers(model: Any, theirs: Any, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 8, "eos_token_id": [3, 7], "pad_token_id": PAD, **options}
    expected = theirs.generate(PROMPTS, attention_mask=BEFORE.int(), do_sample=False, **options)
    found = generate(model, PROMPTS, BEFORE, **options)
    assert torch.equal(found, expected)
    assert (found[:, 5:] == PAD).any() or (found == 3).any() or (found == 7).any()


def test_enough_beams_find_the_best_continuation(model: Any) -> None:
    """Among all continuations of three tokens, none of which ends early."""
    prompt = PROMPTS[2:]
    found = generate(model, prompt, max_new_tokens=3, num_beams=V * V, eos_token_id=[])
    everything = torch.tensor(list(itertools.product(range(V), repeat=3)))
    with torch.no_grad():
        whole = torch.cat([prompt.expand(len(everything), -1), everything], 1)
        logits = model(whole).logits.log_softmax(-1)[:, 4:-1]
    sums = logits.gather(2, everything[:, :, None]).sum((1, 2))
    assert found[0, 5:].tolist() == everything[sums.argmax()].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams: expected at least 1, got 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences: expected from 1 to the 2 beams, got 3"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping: expected True, False or"),
        ({"num_beams": 2, "early_stopping": 1}, "early_stopping: expected True, False or"),
        ({"num_beams": 2.5}, "num_beams: expected at least 1, got 2.5"),
        ({"num_beams": 2, "length_penalty": math.nan}, "length_penalty: expected a finite number, got nan"),
        ({"num_beams": 2, "do_sample": True}, "do_sample: expected False with several beams, got True"),
    ],
)
def test_wrong_options_are_named(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, BEFORE, max_new_tokens=3, **options)
