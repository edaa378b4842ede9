"""What a language model has learnt: its guesses for words of the validation set, compared with a unigram model's."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fasttfm.data import Batch, Tokenizer, TokenShards
from fasttfm.models.objectives import CausalLM, MaskedLM

GUESSES = 3
_LENGTHS = (8, 24)  # the minimum and maximum number of tokens of a shown sentence
_CONTEXT = 4  # the minimum number of tokens before a guessed word
_LETTERS = 4  # the minimum number of letters of a guessed word

Guesses = list[tuple[str, float]]  # words with their probabilities, the most likely first

_PREDICTED = {"masked_lm": "masked tokens", "causal_lm": "next tokens"}  # by the objective's first term


@dataclass(frozen=True)
class GuessedWord:
    """A word in a sentence of the validation set, which was masked or truncated, and the model's guesses for it."""

    before: str
    word: str
    after: str  # empty for a causal model, which does not see it
    guesses: Guesses


@dataclass(frozen=True)
class Learnt:
    """The predictions of a trained model and of word frequencies (a unigram model)."""

    what: str  # the tokens that are predicted
    loss: float  # the model's validation loss for them, in nats
    frequency_loss: float  # the loss if their probabilities are their frequencies in the training set
    words: list[GuessedWord]
    frequent: Guesses  # the most frequent words

    def __str__(self) -> str:
        better = self.frequency_loss - self.loss
        lines = [
            f"{self.what} of the validation set: loss {self.loss:.2f}, {abs(better):.2f} "
            f"{'below' if better >= 0 else 'above'} that of word frequencies ({self.frequency_loss:.2f})"
        ]
        for word in self.words:
            lines += [
                f"  {word.before} [{word.word}] {word.after}".rstrip(),
                f"      model: {_shown(word.guesses)}    word frequencies: {_shown(self.frequent)}",
            ]
        return "\n".join(lines)


def _shown(guesses: Guesses) -> str:
    return ", ".join(f"{word} {100 * probability:.0f}%" for word, probability in guesses)


def learnt(
    objective: MaskedLM | CausalLM,
    tokenizer: Tokenizer,
    training: TokenShards,
    held_out: TokenShards,
    batches: Iterable[Batch],
    loss: float,
    *,
    words: int = 4,
) -> Learnt:
    """What ``objective``'s model has learnt.

    Args:
        batches: The validation batches on which ``loss`` was measured.
        words: The number of words to show, the same ones in every run.
    """
    shares = word_shares(training, tokenizer)
    labels = np.concatenate([predicted(batch) for batch in batches])
    return Learnt(
        _PREDICTED[objective.terms[0]],
        loss,
        float(-np.log(shares[labels]).mean()),
        [_guessed(objective, tokenizer, *chosen) for chosen in _choose(held_out, tokenizer, words)],
        _likeliest(shares, tokenizer),
    )


def predicted(batch: Batch) -> np.ndarray:
    """The tokens that a model predicts in a batch: the masked ones, or all but the first of each sequence."""
    if batch.labels is not None:
        return batch.labels.numpy()
    first = np.zeros(batch.tokens, dtype=bool)
    first[batch.cu_seqlens[:-1].numpy()] = True
    return batch.input_ids.numpy()[~first]


def word_shares(training: TokenShards, tokenizer: Tokenizer) -> np.ndarray:
    """float64 [vocabulary]: each token's frequency in the training set, with one added to all counts (Laplace
    smoothing)."""
    counts = np.ones(tokenizer.vocab_size)
    for number in range(training.documents):
        counts += np.bincount(training.document(number), minlength=len(counts))
    return counts / counts.sum()


def _choose(held_out: TokenShards, tokenizer: Tokenizer, count: int) -> list[tuple[np.ndarray, int]]:
    """Sentences of the validation set, and in each the position of a word that is one token."""
    starts, special = tokenizer.starts_word, tokenizer.special.all()
    numbers = [(document, i) for document in range(held_out.documents) for i in range(_sentences(held_out, document))]
    draw = np.random.default_rng(0)
    sentences: list[tuple[np.ndarray, int]] = []
    for position in draw.permutation(len(numbers)).tolist():
        document, sentence = numbers[position]
        bounds = held_out.sentences(document)
        tokens = held_out.document(document)[bounds[sentence] : bounds[sentence + 1]].astype(np.int64)
        if not _LENGTHS[0] <= len(tokens) <= _LENGTHS[1] or np.isin(tokens, special).any():
            continue
        whole = starts[tokens] & np.append(starts[tokens][1:], True)
        positions = [at for at in np.flatnonzero(whole).tolist() if at >= _CONTEXT]
        words = [at for at in positions if _is_word(tokenizer, int(tokens[at]))]
        if words:
            sentences.append((tokens, words[int(draw.integers(len(words)))]))
        if len(sentences) == count:
            break
    return sentences


def _sentences(shards: TokenShards, document: int) -> int:
    return len(shards.sentences(document)) - 1


def _is_word(tokenizer: Tokenizer, id: int) -> bool:
    text = tokenizer.decode([id]).strip()
    return text.isalpha() and len(unicodedata.normalize("NFD", text)) >= _LETTERS  # NFD: letters of Hangul syllables


@torch.no_grad()
def _guessed(objective: MaskedLM | CausalLM, tokenizer: Tokenizer, tokens: np.ndarray, position: int) -> GuessedWord:
    was_training, device = objective.training, next(objective.parameters()).device
    objective.eval()
    logits = objective.word_logits(torch.from_numpy(tokens).to(device), position, tokenizer.special)
    objective.train(was_training)
    probabilities = logits.double().softmax(-1).cpu().numpy()
    before, word, after = (tokenizer.decode(part).strip() for part in np.split(tokens, [position, position + 1]))
    seen = after if isinstance(objective, MaskedLM) else ""
    return GuessedWord(before, word, seen, _likeliest(probabilities, tokenizer))


def _likeliest(probabilities: np.ndarray, tokenizer: Tokenizer) -> Guesses:
    best: Sequence[int] = np.argsort(-probabilities, kind="stable")[:GUESSES].tolist()
    return [(tokenizer.decode([id]).strip() or tokenizer.token(id), float(probabilities[id])) for id in best]
