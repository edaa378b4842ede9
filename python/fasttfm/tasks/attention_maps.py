"""Attention weights of a text, as pictures: a small map for each head, in a PNG or in a page of HTML."""

from __future__ import annotations

import base64
import html
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasttfm._atomic_files import atomic_write, write_text
from fasttfm._fonts import fonts_for
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.opening import base_of
from fasttfm.models.families import longest_input
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.attention_page import PAGE
from fasttfm.tasks.embedding import sequence_format
from fasttfm.tasks.inputs import Feature, collate

_MAX_LABELS = 40  # with more tokens, their labels at the sides of a map are too small to read
_MAX_LABELLED_HEADS = 6  # with more heads in a row, maps are too small for labels


@dataclass(frozen=True)
class AttentionMaps:
    """The attention weights of a text.

    Args:
        tokens: The text's tokens, special tokens included.
        weights: fp32 [layers, heads, tokens, tokens]: queries are rows, keys are columns.
        layers, heads: Their numbers in the model, counted from 1.
    """

    tokens: list[str]
    weights: np.ndarray
    layers: list[int]
    heads: list[int]

    def select(self, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> AttentionMaps:
        """Only these layers and heads, counted from 1."""
        chosen = []
        for name, numbers, known in (("layers", layers, self.layers), ("heads", heads, self.heads)):
            unknown = [number for number in numbers or () if number not in known]
            if unknown:
                raise ValueError(f"{name}: expected numbers from {known[0]} to {known[-1]}, got {unknown[0]}")
            chosen.append(list(known if numbers is None else numbers))
        rows, columns = (
            [known.index(number) for number in numbers]
            for known, numbers in zip((self.layers, self.heads), chosen, strict=True)
        )
        return AttentionMaps(self.tokens, self.weights[np.ix_(rows, columns)], *chosen)

    def save(self, path: Path, title: str = "") -> None:
        """Writes a picture (``.png``) or a page that needs no other file (``.html``)."""
        if path.suffix == ".html":
            write_text(path, self._page(title))
        elif path.suffix == ".png":
            self._picture(path, title)
        else:
            raise ValueError(f"path: expected a name that ends in .html or .png, got {path}")

    def _page(self, title: str) -> str:
        largest = self.weights.max((2, 3))
        scaled = np.rint(self.weights / largest[..., None, None].clip(1e-9) * 255).astype(np.uint8)
        data = {
            "tokens": self.tokens,
            "layers": self.layers,
            "heads": self.heads,
            "largest": [[round(float(value), 4) for value in row] for row in largest],
            "weights": base64.b64encode(scaled.tobytes()).decode(),
        }
        text = json.dumps(data).replace("<", "\\u003c")  # so that no </script> in a token ends the script
        return PAGE.replace("$TITLE", html.escape(title)).replace("$DATA", text)

    def _picture(self, path: Path, title: str) -> None:
        try:
            import matplotlib
        except ImportError:
            raise ImportError("a picture needs matplotlib: pip install matplotlib; .html needs nothing") from None
        matplotlib.use("Agg")
        with fonts_for((*self.tokens, title)):
            self._draw(path, title)

    def _draw(self, path: Path, title: str) -> None:
        from matplotlib import pyplot

        rows, columns = self.weights.shape[:2]
        labelled = len(self.tokens) <= _MAX_LABELS and columns <= _MAX_LABELLED_HEADS
        side = max(1.0, 0.17 * len(self.tokens) + 0.6) if labelled else 1.0
        size = (columns * side + 0.8, rows * side + 1.0)
        figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for row, layer in enumerate(self.layers):
            for column, head in enumerate(self.heads):
                panel = grid[row][column]
                panel.imshow(self.weights[row, column], cmap="Blues", vmin=0.0, interpolation="nearest")
                panel.set_xticks([])
                panel.set_yticks([])
                if row == 0:
                    panel.set_title(f"head {head}", fontsize=8)
                if column == 0:
                    panel.set_ylabel(f"layer {layer}", fontsize=8)
                if labelled:
                    panel.set_xticks(range(len(self.tokens)), self.tokens, rotation=90, fontsize=6)
                    panel.set_yticks(range(len(self.tokens)), self.tokens if column == 0 else [], fontsize=6)
        note = "rows attend to columns; each map from 0 (white) to its largest weight"
        figure.suptitle(f"{title}\n{note}" if title else note, fontsize=9)
        with atomic_write(path) as partial:
            figure.savefig(partial, dpi=130, format="png")
        pyplot.close(figure)


def attention_maps(
    model: PretrainedModel,
    tokenizer: Tokenizer,
    text: str,
    second: str | None = None,
    *,
    max_tokens: int = 128,
) -> AttentionMaps:
    """The attention weights of a text, or of two as the model reads a pair; a text that is too long is truncated, with
    a warning."""
    length = min(max_tokens, longest_input(model.config))
    form = sequence_format(model, tokenizer, length)
    ids = tokenizer.encode(text)
    sequence = form.one(ids) if second is None else form.two(ids, tokenizer.encode(second))
    if not sequence.ids:
        raise ValueError("text: expected tokens, got none")
    if sequence.cut:
        warnings.warn(f"the text has more than {length} tokens and is truncated by {sequence.cut}", stacklevel=2)
    base = base_of(model.eval())
    batch = collate([Feature(0, [sequence])], segments=form.segments).to(next(model.parameters()).device)
    inputs: dict[str, Any] = {
        "cu_seqlens": batch.cu_seqlens,
        "max_seqlen": len(sequence.ids),
        "output_attentions": True,
    }
    segments = batch.token_type_ids if base.has_segments else None
    with torch.inference_mode():
        attentions = base.encode(batch.input_ids, token_type_ids=segments, **inputs).attentions
    assert attentions is not None
    weights = torch.cat(tuple(attentions)).float().cpu().numpy()
    tokens = [tokenizer.token(id).replace("Ġ", "␣").replace("Ċ", "⏎") for id in sequence.ids]
    return AttentionMaps(tokens, weights, *(list(range(1, size + 1)) for size in weights.shape[:2]))
