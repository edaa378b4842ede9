"""Distillation losses: DistilBERT's (Sanh et al., 2019) and TinyBERT's (Jiao et al., 2020).

A recipe is a module around the student. Called with a batch, it returns the sums of its losses; ``counts`` returns
their divisors, and ``weights`` the weights of their means in the loss. The teacher is not a submodule, because it is
neither trained nor saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.inference.opening import base_of
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import Encoded
from fasttfm.nn import CausalLMHead, MaskedLMHead, PackedBatch, PackedLayer
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.plain import is_plain
from fasttfm.train.settings import at_least

ATTENTION = ("scores", "weights")


class Recipe(nn.Module):
    """A student and its teacher."""

    terms: tuple[str, ...]
    weights: tuple[float, ...]

    def __init__(
        self,
        student: PretrainedModel,
        teacher: PretrainedModel,
        terms: Sequence[str],
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.terms = tuple(terms)
        self.weights = (1.0,) * len(self.terms) if weights is None else tuple(weights)
        self.student = student
        self._teacher = (teacher.requires_grad_(False).eval(),)  # in a tuple, so that it is not a submodule

    @property
    def teacher(self) -> PretrainedModel:
        return self._teacher[0]

    def both(self, batch: Any, *, hidden_states: bool = False) -> tuple[Encoded, Encoded]:
        """Encodes a batch with the student and with the teacher."""
        with torch.no_grad():
            theirs = encode(self.teacher, batch, hidden_states)
        return encode(self.student, batch, hidden_states), theirs


def check_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")


def encode(model: PretrainedModel, batch: Any, hidden_states: bool = False) -> Encoded:
    """Encodes a packed batch, without segments if the model has none."""
    base = base_of(model)
    segments = batch.token_type_ids if base.has_segments else None
    layout: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen}
    layout |= {"output_hidden_states": hidden_states, "output_attentions": False}
    return base.encode(batch.input_ids, token_type_ids=segments, **layout)


# ---- DistilBERT ------------------------------------------------------------------------------------------------------


class DistilBertRecipe(Recipe):
    """The KL divergence from the teacher's softened distribution, the LM loss, and the cosine of the last hidden
    states.

        soft_targets = temperature^2 * KL(softmax(teacher / temperature) || softmax(student / temperature))
        masked_lm    = cross entropy of the masked tokens; causal_lm of the next tokens for a GPT
        cosine       = 1 - cos(student's state, teacher's state)

    Args:
        student: A masked LM or causal LM, as wide as the teacher.
        teacher: A model of the same kind with the same vocabulary.
        weights: The weights of the three terms.
        all_tokens: Whether the soft targets are those of all tokens, as in the paper, or only of the masked ones, which
            are about a seventh.
    """

    def __init__(
        self,
        student: PretrainedModel,
        teacher: PretrainedModel,
        *,
        temperature: float = 2.0,
        weights: tuple[float, float, float] = (5.0, 2.0, 1.0),
        all_tokens: bool = True,
    ) -> None:
        causal = isinstance(_lm_head(teacher), CausalLMHead)
        super().__init__(student, teacher, ("soft_targets", "causal_lm" if causal else "masked_lm", "cosine"), weights)
        for name, expected, got in zip(("vocab_size", "hidden_size"), _sizes(teacher), _sizes(student), strict=True):
            if expected != got:
                raise ValueError(f"DistilBertRecipe: student: expected the teacher's {name} {expected}, got {got}")
        if not all_tokens and causal:
            raise ValueError("soft targets: expected all tokens for a GPT, which has no masked tokens, got masked")
        check_temperature(temperature)
        for weight in weights:
            at_least("weights", weight, 0)
        if not any(weights):
            raise ValueError(f"weights: expected at least one above 0, got {weights}")
        self.temperature, self.all_tokens = temperature, all_tokens

    def counts(self, batch: Any) -> tuple[float, ...]:
        return (batch.tokens if self.all_tokens else batch.predictions, batch.predictions, batch.tokens)

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        student, teacher = self.both(batch)
        head, theirs = _lm_head(self.student), _lm_head(self.teacher)
        words = _words(head, student.x, batch)
        cosine = (1 - functional.cosine_similarity(student.x.float(), teacher.x.float(), dim=-1)).sum()
        positions = None if self.all_tokens else batch.positions
        return _soft_targets(head, theirs, student, teacher, positions, self.temperature), words, cosine


def _soft_targets(
    head: MaskedLMHead | CausalLMHead,
    theirs: MaskedLMHead | CausalLMHead,
    student: Encoded,
    teacher: Encoded,
    positions: Tensor | None,
    temperature: float,
) -> Tensor:
    """The sum over ``positions``, by default all tokens, of the KL divergence of the student's distribution over the
    vocabulary from the teacher's."""
    x, y = student.x, teacher.x
    if positions is not None:
        x, y = (rows.index_select(0, positions) for rows in (x, y))
    with torch.no_grad():
        y = _transformed(theirs, y)
    return ops.distillation_loss(
        _transformed(head, x),
        head.decoder.weight,
        y,
        theirs.decoder.weight,
        student_bias=head.decoder.bias,
        teacher_bias=theirs.decoder.bias,
        temperature=temperature,
        reduction="sum",
    )


def _sizes(model: PretrainedModel) -> tuple[int, int]:
    """The size of the vocabulary, and the width."""
    return model.config.vocab_size, base_of(model).encoder.in_order()[0].width


def _words(head: MaskedLMHead | CausalLMHead, x: Tensor, batch: Any) -> Tensor:
    """The sum of the LM loss."""
    if isinstance(head, CausalLMHead):
        return head.loss(x, batch.input_ids, batch.cu_seqlens, reduction="sum")
    return head.loss(x, batch.labels, positions=batch.positions) * batch.predictions


def _transformed(head: MaskedLMHead | CausalLMHead, x: Tensor) -> Tensor:
    """The input of the head's decoder."""
    return x if isinstance(head, CausalLMHead) else head.transform(x)


def _lm_head(model: PretrainedModel) -> MaskedLMHead | CausalLMHead:
    head = model.get_submodule("lm_head")
    assert isinstance(head, (MaskedLMHead, CausalLMHead))
    if not is_plain(head):
        expected = "a head and a decoder without hooks, wrappers or LoRA (the loss reads their weights)"
        raise ValueError(f"DistilBertRecipe: lm_head: expected {expected}, got {head!r}")
    return head


# ---- TinyBERT --------------------------------------------------------------------------------------------------------


def layer_map(student: int, teacher: int) -> list[int]:
    """The teacher's layer, counted from 1, that each of the student's layers learns from: evenly spaced, the last from
    the last."""
    if not 1 <= student <= teacher:
        raise ValueError(
            f"layer_map: student: expected 1 to {teacher} layers, as many as the teacher has, got {student}"
        )
    return [-(-layer * teacher // student) for layer in range(1, student + 1)]


class TinyBertRecipe(Recipe):
    """The distances of embeddings, attention maps and hidden states to those of a teacher, which may be wider. Student
    layer m learns from teacher layer g(m).

        embeddings  = MSE(E_student W_e, E_teacher)
        attention_m = the mean over heads of MSE(A_student(m), A_teacher(g(m)))
        hidden_m    = MSE(H_student(m) W_h, H_teacher(g(m)))
        soft_targets = KL(softmax(teacher) || softmax(student)) for the tokens of the vocabulary, with ``predictions``

    The projections W_e and W_h are trained with the student, and absent if both have the same width. A are the scores
    before the softmax, with which the paper found faster convergence, or the weights after it. The MSE is a mean over
    the keys that each query attends to (in a GPT only earlier ones), then over the queries of the batch, so that every
    token has the same weight.

    Args:
        layers: g, evenly spaced by default (``layer_map``).
        attention: "scores" or "weights".
        predictions: Whether the loss also has the soft targets of all tokens; both models then have an LM head.
        projections: The initial state dict of ``projections``.
    """

    def __init__(
        self,
        student: PretrainedModel,
        teacher: PretrainedModel,
        *,
        layers: Sequence[int] | None = None,
        attention: str = "scores",
        predictions: bool = False,
        projections: dict[str, Tensor] | None = None,
    ) -> None:
        ours, theirs = base_of(student).encoder.in_order(), base_of(teacher).encoder.in_order()
        by_layer = [f"{name}_{m}" for name in ("attention", "hidden") for m in range(1, len(ours) + 1)]
        super().__init__(student, teacher, ("embeddings", *by_layer, *(["soft_targets"] if predictions else [])))
        self.predictions = predictions
        self.layers = list(layer_map(len(ours), len(theirs)) if layers is None else layers)
        if len(self.layers) != len(ours) or not all(1 <= layer <= len(theirs) for layer in self.layers):
            expected = f"{len(ours)} numbers from 1 to {len(theirs)}"
            raise ValueError(f"TinyBertRecipe: layers: expected {expected}, got {self.layers}")
        if ours[0].heads != theirs[0].heads:
            expected = f"as many attention heads as the teacher's {theirs[0].heads}"
            raise ValueError(f"TinyBertRecipe: student: expected {expected}, got {ours[0].heads}")
        if attention not in ATTENTION:
            raise ValueError(f"TinyBertRecipe: attention: expected one of {', '.join(ATTENTION)}, got {attention!r}")
        self.attention = attention
        narrow, wide = (layers[0].width for layers in (ours, theirs))
        self.projections = nn.ModuleDict()
        if narrow != wide:
            for name in ("embeddings", "hidden"):
                self.projections[name] = nn.Linear(narrow, wide, bias=False)
        if projections is not None:
            try:
                self.projections.load_state_dict(projections)
            except RuntimeError as error:
                raise ValueError(f"TinyBertRecipe: projections: expected those of this student: {error}") from error

    def counts(self, batch: Any) -> tuple[float, ...]:
        return (batch.tokens,) * len(self.terms)

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        student, teacher = self.both(batch, hidden_states=True)
        assert student.hidden_states is not None
        assert teacher.hidden_states is not None
        ours, theirs = student.hidden_states, teacher.hidden_states  # of the embeddings, then of every layer
        embeddings = self._distance("embeddings", ours[0], theirs[0])
        hidden = [self._distance("hidden", ours[m], theirs[g]) for m, g in enumerate(self.layers, start=1)]
        maps = []
        for m, g in enumerate(self.layers):
            layer = base_of(self.student).encoder.in_order()[m]
            other = base_of(self.teacher).encoder.in_order()[g - 1]
            with torch.no_grad():
                target = self._map(other, theirs[g - 1], teacher.batch)
            pairs = _pairs(student.batch, layer.window, other.window)
            maps.append(_map_distance(self._map(layer, ours[m], student.batch), target, pairs))
        if not self.predictions:
            return embeddings, *maps, *hidden
        heads = _lm_head(self.student), _lm_head(self.teacher)
        return embeddings, *maps, *hidden, _soft_targets(*heads, student, teacher, None, 1.0)

    def _distance(self, name: str, x: Tensor, target: Tensor) -> Tensor:
        """The sum over tokens of the mean over features of squared differences."""
        if name in self.projections:
            x = self.projections[name](x)
        return (x.float() - target.float()).square().mean(-1).sum()

    def _map(self, layer: PackedLayer, x: Tensor, batch: PackedBatch) -> Tensor:
        """The attention map [sequences, H, S, S] of the layer for its input ``x``."""
        if layer.norm_first:
            x = layer_norm(layer.norm1, x)
        if self.attention == "weights":
            return layer.attention_weights(x, batch.cu_seqlens, batch.max_seqlen)
        q, k, _ = layer.project(x).unbind(-3)  # [T, H, D]
        q, k = (batch.per_sequence(projected, fill=0.0).transpose(1, 2).float() for projected in (q, k))
        return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def _pairs(batch: PackedBatch, *windows: tuple[int | None, int | None]) -> Tensor:
    """Bool [sequences, S, S]: whether a query attends to a key in layers with all of these windows."""
    longest = batch.max_seqlen if batch.shape is None else batch.shape[1]
    positions = torch.arange(longest, device=batch.cu_seqlens.device)
    inside = positions < batch.cu_seqlens.diff()[:, None]
    pairs = inside[:, :, None] & inside[:, None, :]
    distance = positions[None, :] - positions[:, None]  # of the key from the query
    for left, right in windows:
        for bound, beyond in ((left, -distance), (right, distance)):
            if bound is not None and bound >= 0:
                pairs = pairs & (beyond <= bound)
    return pairs


def _map_distance(student: Tensor, target: Tensor, pairs: Tensor) -> Tensor:
    """The sum over queries of the mean over heads and the query's keys of squared differences."""
    squares = (student - target).square().mean(1).where(pairs, 0.0)
    return (squares.sum(-1) / pairs.sum(-1).clamp(min=1)).sum()


# ---- a task's predictions --------------------------------------------------------------------------------------------


def soft_cross_entropy(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """``-sum over classes of softmax(target / temperature) * log softmax(logits / temperature)``, summed over rows."""
    probabilities = (target.float() / temperature).softmax(-1)
    return -(probabilities * (logits.float() / temperature).log_softmax(-1)).sum()


def soft_binary_cross_entropy(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """The mean over labels of the cross entropy with ``sigmoid(target / temperature)``, summed over rows."""
    probabilities = (target.float() / temperature).sigmoid()
    logits = logits.float() / temperature
    return functional.binary_cross_entropy_with_logits(logits, probabilities, reduction="none").mean(-1).sum()


def squared_error(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """The mean over values of their squared differences, summed over rows. Values have no temperature."""
    return (logits.float() - target.float()).square().mean(-1).sum()
