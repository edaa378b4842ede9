"""``EXPERIMENTS``: all experiments by name. This is the only list of experiments."""

from __future__ import annotations

from fasttfm.tasks.experiments import (
    bert_size,
    layer_features,
    lightweight,
    masking_rate,
    model_size,
    replaced_tokens,
    sentence_order,
    sentence_pairs,
    sharing,
    shots,
)
from fasttfm.tasks.experiments.lab import Experiment

_FILES = (
    *(sentence_pairs, sentence_order, sharing, replaced_tokens, masking_rate),
    *(bert_size, model_size, shots, layer_features, lightweight),
)
EXPERIMENTS: dict[str, Experiment] = {file.EXPERIMENT.name: file.EXPERIMENT for file in _FILES}
