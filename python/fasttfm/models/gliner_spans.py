"""GLiNER (Zaratiana et al., 2023): finds entities of any types, which are given in words, in a text.

    [CLS] <<ENT>> type 1 <<ENT>> type 2 <<SEP>> word 1 word 2 ... [SEP]

    p_c = MLP(state of the c-th <<ENT>>)             x = LSTM(states of the words' first tokens)
    s_ij = MLP(relu([MLP(x_i); MLP(x_j)]))           probability(span i to j has type c) = sigmoid(s_ij . p_c)

The MLP of spans is linear in its last layer and in its two inputs, so that its products are computed once for each
word and type, and not for each span:

    s_ij . p_c = relu(A relu(MLP(x_i)) + B relu(MLP(x_j)) + a) . (D' p_c) + d . p_c

The encoder is DeBERTa-v2's or -v3's, over packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fasttfm.models.deberta_v2 import DebertaV2Model
from fasttfm.models.gliner_config import GLiNERConfig
from fasttfm.models.outputs import ModelOutput
from fasttfm.models.text_model import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class GLiNEROutput(ModelOutput):
    """Logits of all spans that start at a word and have a width, -inf for those that end after their text."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # [sequences, words, max_width, types]
    span_mask: Tensor | None = None  # bool [sequences, words, max_width]: whether the span ends in its text
    type_mask: Tensor | None = None  # bool [sequences, types]


@dataclass(frozen=True)
class SpanLoss:
    """Binary cross-entropy of all spans and types, or with ``gamma`` the focal loss; probabilities below 1e-6 are
    clamped, as in the gliner package.

    Args:
        alpha: The weight of spans with a type, and one less this weight for others; -1 for no weights.
        gamma: The exponent of (1 - the probability of the label).
        reduction: "sum", or "mean" over the spans.
    """

    alpha: float = -1.0
    gamma: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "sum"

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "mean"):
            raise ValueError(f"SpanLoss: reduction: expected sum or mean, got {self.reduction!r}")

    def __call__(self, logits: Tensor, labels: Tensor, span_mask: Tensor, type_mask: Tensor) -> Tensor:
        targets = labels.float() * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        yes = logits.float().sigmoid()
        no = 1 - yes
        losses = -targets * yes.clamp(min=1e-6).log() - (1 - targets) * no.clamp(min=1e-6).log()
        if self.gamma > 0:
            losses = losses * (1 - (yes * targets + no * (1 - targets))) ** self.gamma
        if self.alpha >= 0:
            losses = losses * (self.alpha * targets + (1 - self.alpha) * (1 - targets))
        counted = span_mask[..., None] & type_mask[:, None, None]
        total = losses.where(counted, 0).sum()
        return total if self.reduction == "sum" else total / span_mask.sum().clamp(min=1)


class SpanScorer(nn.Module):
    """Scores the spans of texts, given by their tokens, for types of entities."""

    def __init__(self, config: GLiNERConfig) -> None:
        super().__init__()
        config.check()
        if not 0 <= config.class_token_index < config.encoder.vocab_size:
            expected = f"the id of {config.ent_token!r} below {config.encoder.vocab_size}, or a tokenizer"
            raise ValueError(f"GLiNER: class_token_index: expected {expected}, got {config.class_token_index}")
        self.config = config
        width, inner = config.hidden_size, config.encoder.hidden_size
        self.encoder = DebertaV2Model(config.encoder)
        self.projection = nn.Identity() if width == inner else nn.Linear(inner, width)
        layers = config.num_rnn_layers
        self.rnn = nn.LSTM(width, width // 2, layers, batch_first=True, bidirectional=True) if layers else None
        self.start, self.end = (_mlp(width, width, config.dropout) for _ in range(2))
        self.span = _mlp(2 * width, width, config.dropout)
        self.prompt = _mlp(width, width, config.dropout)

    def forward(
        self,
        input_ids: Tensor,
        words_mask: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        loss: SpanLoss | None = None,
        **layout: Unpack[Layout],
    ) -> GLiNEROutput:
        """Scores all spans.

        Args:
            input_ids: [B, S] with a mask or lengths, or packed [T].
            words_mask: Of the same shape: at the first token of each word its number in its text, from 1 on.
            labels: [sequences, words, max_width, types]: 1 where a span that starts at a word and has a width (of one
                word more than its index) is of a type, otherwise 0.
            loss: By default ``SpanLoss()``.
        """
        encoded = self.encoder.encode(input_ids, attention_mask, **layout)
        batch, states = encoded.batch, self.projection(encoded.x)
        ids, words = batch.pack(input_ids), batch.pack(words_mask)
        rows = torch.arange(len(ids), device=ids.device, dtype=batch.cu_seqlens.dtype)
        owners = torch.searchsorted(batch.cu_seqlens, rows, right=True) - 1
        sequences = len(batch.cu_seqlens) - 1
        of_words = words.nonzero()[:, 0]
        lengths = words.new_zeros(sequences).scatter_reduce(0, owners, words, "amax")
        if not sequences or not bool((lengths > 0).all()):
            raise ValueError("GLiNER: words_mask: expected a word or more in every sequence, got a sequence without")
        x = _scattered(states, of_words, owners[of_words], words[of_words] - 1, sequences)
        if self.rnn is not None:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            x = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        of_types = (ids == self.config.class_token_index).nonzero()[:, 0]
        counts = torch.bincount(owners[of_types], minlength=sequences)
        columns = torch.arange(len(of_types), device=ids.device) - (counts.cumsum(0) - counts)[owners[of_types]]
        after = 0 if self.config.embed_ent_token else 1
        types = _scattered(states, of_types + after, owners[of_types], columns, sequences)
        logits = self._scores(x, self.prompt(types))
        place = torch.arange(x.shape[1], device=ids.device)[:, None]
        widths = torch.arange(self.config.max_width, device=ids.device)
        span_mask = place + widths < lengths[:, None, None]
        type_mask = torch.arange(types.shape[1], device=ids.device) < counts[:, None]
        if labels is not None and labels.shape != logits.shape:
            raise ValueError(f"GLiNER: labels: expected shape {tuple(logits.shape)}, got {tuple(labels.shape)}")
        total = None if labels is None else (loss or SpanLoss())(logits, labels, span_mask, type_mask)
        return GLiNEROutput(total, logits.masked_fill(~span_mask[..., None], -torch.inf), span_mask, type_mask)

    def _scores(self, x: Tensor, types: Tensor) -> Tensor:
        """[sequences, words, widths, types]: a product with the types for each width."""
        inner: Any
        last: Any
        inner, _, dropout, last = self.span
        of_start, of_end = inner.weight.split(x.shape[-1], 1)
        start = functional.linear(self.start(x).relu(), of_start, inner.bias)
        end = functional.linear(self.end(x).relu(), of_end)
        queries, offsets = (types @ last.weight).mT, (types @ last.bias)[:, None]
        words = x.shape[1]
        scores = []
        for width in range(self.config.max_width):
            hidden = dropout((start[:, : max(words - width, 0)] + end[:, width:]).relu())
            scores.append(functional.pad(hidden @ queries + offsets, (0, 0, 0, min(width, words))))
        return torch.stack(scores, 2)


def _mlp(inputs: int, outputs: int, dropout: float) -> nn.Sequential:
    inner = nn.Linear(inputs, 4 * outputs), nn.ReLU(), nn.Dropout(dropout)
    return nn.Sequential(*inner, nn.Linear(4 * outputs, outputs))


def _scattered(states: Tensor, rows: Tensor, sequences: Tensor, columns: Tensor, count: int) -> Tensor:
    """Rows of the states at their sequences and columns: [count, columns, C], 0 elsewhere."""
    longest = int(columns.max()) + 1 if len(columns) else 0
    return states.new_zeros(count, longest, states.shape[1]).index_put((sequences, columns), states[rows])
