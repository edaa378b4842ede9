"""Beam search, with the rules and results of transformers.

Every prompt has K running beams, scored by the sum of their tokens' log-probabilities, and up to K finished sequences,
scored by that sum / length^length_penalty. A step ranks the next tokens of all beams. Candidates that end and are among
the K best compete with the finished sequences; the K best of the others become the running beams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm.generate.decoder import CachedDecoder, body_of
from fasttfm.generate.sampling import check_logits, is_count
from fasttfm.nn import PackedBatch

_NO_SCORE = -1e9  # the score of a beam or sequence that does not exist


@dataclass(frozen=True)
class BeamSearch:
    """The options of a search.

    ``early_stopping``: True stops as soon as there are ``num_beams`` finished sequences. False stops when no running
    beam, scored at its current length, is better than the worst finished sequence; "never" when none could become
    better at any length.
    """

    num_beams: int = 4
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        beams, returned, stopping = self.num_beams, self.num_return_sequences, self.early_stopping
        for name, fits, expected in (
            ("num_beams", is_count(beams, 1), "at least 1"),
            ("num_return_sequences", is_count(returned, 1) and returned <= beams, f"from 1 to the {beams} beams"),
            ("length_penalty", math.isfinite(self.length_penalty), "a finite number"),
            ("early_stopping", stopping == "never" or isinstance(stopping, bool), 'True, False or "never"'),
        ):
            if not fits:
                raise ValueError(f"generate: {name}: expected {expected}, got {getattr(self, name)!r}")


class _Beams:
    """The state of a search for B prompts, on the device: scores [B, K] and new tokens [B, K, new]."""

    def __init__(self, search: BeamSearch, prompts: int, new: int, ends: Tensor, device: torch.device) -> None:
        self.search, self.new, self.ends = search, new, ends
        shape = (prompts, search.num_beams)
        self.scores = torch.full(shape, _NO_SCORE, device=device, dtype=torch.float32)
        self.scores[:, 0] = 0.0  # all beams are equal at first: only one of them counts
        self.tokens = torch.full((*shape, new), -1, dtype=torch.int64, device=device)
        self.finished_scores = torch.full(shape, _NO_SCORE, device=device, dtype=torch.float32)
        self.finished = self.tokens.clone()
        self.has_finished = torch.zeros(shape, dtype=torch.bool, device=device)
        self.improving = torch.ones(prompts, 1, dtype=torch.bool, device=device)

    def advance(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Adds token number ``count`` from logits [B * K, V]. Returns the last token of each running beam and the beam
        that it continues: int64 [B, K]."""
        check_logits(logits)
        beams = self.search.num_beams
        vocab = logits.shape[-1]
        sums = logits.float().log_softmax(-1).view(-1, beams, vocab) + self.scores[:, :, None]
        kept = max(2, 1 + len(self.ends)) * beams
        best, indices = sums.flatten(1).topk(min(kept, beams * vocab))
        origins, chosen = indices // vocab, indices % vocab
        sequences = self.tokens.gather(1, origins[:, :, None].expand(-1, -1, self.new))
        sequences[:, :, count] = chosen
        ending = torch.isin(chosen, self.ends) | (count + 1 == self.new)
        self._finish(best, sequences, ending, count)
        self.scores, running = (best + ending.to(best.dtype) * _NO_SCORE).topk(beams)
        self.tokens = sequences.gather(1, running[:, :, None].expand(-1, -1, self.new))
        self._update_improving(count)
        return chosen.gather(1, running), origins.gather(1, running)

    def _finish(self, best: Tensor, sequences: Tensor, ending: Tensor, count: int) -> None:
        search, beams = self.search, self.search.num_beams
        scores = best / (count + 1) ** search.length_penalty
        closed = ~self.improving
        if search.early_stopping is True:
            closed = closed | self.has_finished.all(1, keepdim=True)
        ranks = torch.arange(best.shape[1], device=best.device)
        counts = ending & (ranks < beams) & ~closed
        merged = torch.cat([self.finished_scores, scores.masked_fill(~counts, _NO_SCORE)], 1)
        self.finished_scores, order = merged.topk(beams)
        sequences = torch.cat([self.finished, sequences], 1)
        self.finished = sequences.gather(1, order[:, :, None].expand(-1, -1, self.new))
        self.has_finished = torch.cat([self.has_finished, counts], 1).gather(1, order)

    def _update_improving(self, count: int) -> None:
        """Updates which prompts can still get a better sequence."""
        search = self.search
        longest = self.new if search.early_stopping == "never" and search.length_penalty > 0 else count + 1
        possible = self.scores[:, :1] / longest**search.length_penalty
        lowest = self.finished_scores.amin(1, keepdim=True).expand_as(self.finished_scores)
        worst = lowest.masked_fill(~self.has_finished, _NO_SCORE)
        self.improving = self.improving & (possible > worst).any(1, keepdim=True)

    def is_done(self) -> bool:
        done = ~self.improving.any()
        if self.search.early_stopping is True:
            done = done | self.has_finished.all()
        return bool(done)

    def results(self) -> Tensor:
        """The new tokens of the best sequences, -1 after their ends: [B * num_return_sequences, new]."""
        tokens = torch.where(self.has_finished[:, :, None], self.finished, self.tokens)
        return tokens[:, : self.search.num_return_sequences].flatten(0, 1)


@torch.no_grad()
def search_beams(model: Any, ids: Tensor, batch: PackedBatch, new: int, ends: list[int], search: BeamSearch) -> Tensor:
    """The new tokens [B * num_return_sequences, up to new] after packed prompts ``ids`` [T], -1 after their ends."""
    prompts, count = batch.cu_seqlens.shape[0] - 1, search.num_beams
    decoder = CachedDecoder(body_of(model), batch.max_seqlen + new, prompts * count)
    device = ids.device
    first_slots = torch.arange(prompts, device=device) * count
    state = decoder.read(ids, batch, first_slots)
    every_slot = torch.arange(prompts * count, device=device)
    decoder.copy(every_slot // count * count, every_slot, batch.max_seqlen)
    logits = model.lm_head(state).repeat_interleave(count, 0)
    beams = _Beams(search, prompts, new, torch.tensor(ends, dtype=torch.int64, device=device), device)
    for number in range(new):
        tokens, origins = beams.advance(logits, number)
        if number + 1 == new or beams.is_done():
            break
        decoder.copy((origins + first_slots[:, None]).flatten(), every_slot, batch.max_seqlen + number)
        logits = decoder.next_logits(model.lm_head, tokens.flatten())
    sequences = beams.results()
    return sequences[:, : int((sequences >= 0).any(0).sum())]
