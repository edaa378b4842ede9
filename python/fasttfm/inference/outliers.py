"""``outlier_columns``: the columns that int8 GEMMs on a CPU leave in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm.inference.batches import pack
from fasttfm.inference.opening import base_of
from fasttfm.models.families import longest_input
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import LAST_STATES
from fasttfm.ops.int8_linear import OUTLIERS

_SEQUENCES, _LENGTH = 8, 24  # of random ids


@torch.no_grad()
def outlier_columns(model: PretrainedModel, linears: Sequence[nn.Linear]) -> dict[nn.Linear, list[int]]:
    """The ``OUTLIERS`` columns with the largest elements in the inputs of each linear layer, in ascending order.

    The model, in fp32 on the CPU, runs on random ids, so that the result depends on nothing but the model: a trained
    model has the same outlier columns in all texts. Layers that the model does not call, and those with too few
    columns, are left out.
    """
    largest: dict[nn.Linear, Tensor] = {}

    def measure(linear: nn.Linear, inputs: tuple[Tensor]) -> None:
        found = inputs[0].abs().flatten(0, -2).amax(0)
        largest[linear] = torch.maximum(found, largest.get(linear, found))

    length = min(_LENGTH, longest_input(model.config))
    batch = pack(list(np.random.RandomState(0).randint(0, model.config.vocab_size, (_SEQUENCES, length))))
    ids, bounds = torch.from_numpy(batch.ids), torch.from_numpy(batch.cu_seqlens)
    hooks = [linear.register_forward_pre_hook(measure) for linear in linears]
    try:
        with torch.autocast("cpu", enabled=False):
            base_of(model).encode(input_ids=ids, cu_seqlens=bounds, max_seqlen=batch.max_seqlen, **LAST_STATES)
    finally:
        for hook in hooks:
            hook.remove()
    wide = {linear: amax for linear, amax in largest.items() if len(amax) > OUTLIERS}
    return {linear: sorted(amax.topk(OUTLIERS).indices.tolist()) for linear, amax in wide.items()}
