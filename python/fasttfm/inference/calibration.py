"""``Calibration``: the magnitudes that the static scales of FP8 inference follow from, and their file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm._atomic_files import write_json
from fasttfm.inference.batches import pack, plan
from fasttfm.inference.formats import Tokens, segments_of
from fasttfm.inference.input_reader import InputReader
from fasttfm.inference.network import Inputs, Network, Output
from fasttfm.inference.windows import is_single
from fasttfm.models.checkpoint_files import CheckpointError, read_json
from fasttfm.nn.fp8_inference import measuring, use_fp8
from fasttfm.ops.fp8.inference import LINEARS

CALIBRATION = "fp8_calibration.json"


@dataclass(frozen=True)
class Calibration:
    """The largest magnitudes of the inputs of linear layers, over some texts.

    Args:
        amax: One tuple for each transformer layer: the inputs of the projection to queries, keys and values, of
            attention's output projection, and of both linear layers of the feed-forward block. A layer that occurs more
            than once (ALBERT) has one.
        tokens: The number of tokens that were measured.
    """

    amax: tuple[tuple[float, ...], ...]
    tokens: int

    @classmethod
    def of(cls, amax: Tensor, tokens: int) -> Calibration:
        return cls(tuple(map(tuple, amax.tolist())), tokens)

    def tensor(self, device: torch.device) -> Tensor:
        """fp32 ``[layers, 4]``"""
        return torch.tensor(self.amax, dtype=torch.float32, device=device)

    def save(self, directory: str | Path) -> Path:
        """Writes the file next to a checkpoint, where ``Session`` finds it."""
        path = Path(directory) / CALIBRATION
        layers = [dict(zip(LINEARS, magnitudes, strict=True)) for magnitudes in self.amax]
        write_json(path, {"tokens": self.tokens, "amax": layers}, indent=1)
        return path

    @classmethod
    def load(cls, directory: str | Path) -> Calibration | None:
        """Reads the file of a directory; None if there is none."""
        path = Path(directory) / CALIBRATION
        if not path.is_file():
            return None
        content = read_json(path)
        try:
            layers = tuple(tuple(float(layer[name]) for name in LINEARS) for layer in content["amax"])
            calibration = cls(layers, int(content["tokens"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path}: expected magnitudes of layers, got {error!r}") from error
        if not layers or calibration.tokens < 1 or not all(0 <= amax < math.inf for layer in layers for amax in layer):
            got = f"{calibration!r:.200}"
            raise CheckpointError(f"{path}: expected finite magnitudes of layers over at least one token, got {got}")
        return calibration


def calibrate(network: Network, sequences: Sequence[Tokens], max_tokens: int, max_batch: int) -> Calibration:
    """Runs the network in its dtype over sequences."""
    lengths = [len(tokens.ids) for tokens in sequences]
    if not any(lengths):
        raise ValueError("Session: calibration: expected texts with tokens, got none")
    with measuring(network.base.encoder) as amax:
        for group in plan(lengths, max_tokens, max_batch):
            part = [sequences[index] for index in group]
            batch = pack([tokens.ids for tokens in part], segments_of(part) if network.has_segments else None)
            network.run(Output.STATES, Inputs.of(batch, network.device))
    return Calibration.of(amax, sum(lengths))


def run_in_fp8(network: Network, calibration: Calibration) -> None:
    """Makes the network compute its layers' GEMMs in FP8."""
    use_fp8(network.base.encoder, calibration.tensor(network.device))


def in_fp8(
    network: Network, reader: InputReader, source: Calibration | Sequence[Any] | None, max_tokens: int, max_batch: int
) -> Calibration:
    """Makes the network compute in FP8. Returns what its scales follow from: ``source``, or the magnitudes that its
    inputs have."""
    if source is None:
        raise ValueError(f"Session: calibration: expected texts, or {CALIBRATION} next to the checkpoint, got none")
    calibration = source
    if not isinstance(calibration, Calibration):
        texts = [calibration] if is_single(calibration) else calibration
        calibration = calibrate(network, reader.read(texts), max_tokens, max_batch)
    run_in_fp8(network, calibration)
    return calibration
