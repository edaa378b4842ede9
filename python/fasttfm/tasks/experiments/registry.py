"""``EXPERIMENTS``: all experiments by name. This is the only list of experiments."""

from __future__ import annotations

from fasttfm.tasks.experiments import (
    layer_features,
    lightweight,
    model_size,
    replaced_tokens,
    sentence_pairs,
    sharing,
    shots,
)
from fasttfm.tasks.experiments.lab import Experiment

_FILES = (sentence_pairs, sharing, replaced_tokens, model_size, shots, layer_features, lightweight)
EXPERIMENTS: dict[str, Experiment] = {file.EXPERIMENT.name: file.EXPERIMENT for file in _FILES}
