"""``choose``: the precision of a session with ``precision="auto"`` on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from fasttfm.inference.batches import pack
from fasttfm.inference.cpu_linear import has_bf16_instructions
from fasttfm.inference.input_reader import InputReader
from fasttfm.inference.network import Inputs, Network, Output
from fasttfm.ops.int8_linear import supported_products

# The smallest cosine of a sample's vectors to those in fp32. With less, the order of near neighbours changes: int8 with
# 0.998 changes about one of 35 among the nearest ten.
LEAST_COSINE = 0.9995
# Texts of several lengths, kinds and languages.
SAMPLE = (
    "Peace.",
    "How do I reset my password?",
    "The committee approved the budget for the next fiscal year after two days of debate.",
    "a wonderful little film, funny and sad, that deserves a far larger audience than it will find",
    "Order 66-1042 shipped on 2021-03-04; the total is $1,284.50, taxes included.",
    "def mean(values): return sum(values) / len(values)",
    "Water expands as it freezes, which is why ice floats and why pipes burst in winter.",
    "Did the army cross the river before the treaty was signed, or only in the spring of the following year?",
    "NOT AGAIN!!! the app crashes every time i open it :(",
    "La paz y el comercio con todas las naciones.",
    "Der Zug nach Hamburg fährt heute von Gleis sieben ab.",
    "和平与贸易对所有国家都有好处。",
    "The patient was given 5 mg twice daily. No adverse effects were observed, and the blood pressure, which had been "
    "high for several weeks, returned to normal values within ten days of the beginning of the treatment.",
)
_SEQUENCES, _LENGTH = 8, 24  # of random ids, for a session without a tokenizer


class Precision(NamedTuple):
    dtype: torch.dtype
    int8: bool = False

    @property
    def name(self) -> str:
        return "int8" if self.int8 else str(self.dtype).removeprefix("torch.")


FLOAT32, BFLOAT16, INT8 = Precision(torch.float32), Precision(torch.bfloat16), Precision(torch.float32, int8=True)


class Choice(NamedTuple):
    """A network, its precision, and a sentence that says why."""

    network: Network
    precision: Precision
    reason: str


def candidates() -> list[Precision]:
    """The precisions whose GEMMs are faster than those in fp32 on this CPU, the fastest first."""
    products = supported_products()[-1]
    precisions = [INT8] if products not in ("generic", "words") else []
    if has_bf16_instructions():  # AMX multiplies in bf16 as fast as in int8, for which inputs are rounded with scales
        precisions.insert(0 if products == "amx" else len(precisions), BFLOAT16)
    return precisions


def choose(make: Callable[[Precision], Network], reader: InputReader) -> Choice:
    """The fastest precision with which the smallest cosine of a sample's vectors to those in fp32 is above
    ``LEAST_COSINE``. It depends only on the model and the CPU's instructions: nothing is timed."""
    exact = make(FLOAT32)
    able = candidates()
    if not able:
        return Choice(exact, FLOAT32, "this CPU has no instructions for faster GEMMs in 16 or 8 bits")
    inputs, count = _sample(reader, exact.device)
    expected = exact.run(Output.VECTORS, inputs)
    refused: list[str] = []
    for precision in able:
        network = make(precision)
        least = _smallest_cosine(network.run(Output.VECTORS, inputs), expected)
        measured = f"in {precision.name} the smallest cosine of {count} sample texts to float32 is {least:.5f}"
        if least > LEAST_COSINE:
            return Choice(network, precision, "; ".join([*refused, f"{measured}, above {LEAST_COSINE}"]))
        refused.append(f"{measured}, not above {LEAST_COSINE}")
    return Choice(exact, FLOAT32, "; ".join(refused))


def _sample(reader: InputReader, device: torch.device) -> tuple[Inputs, int]:
    """A packed batch, and its number of texts."""
    sequences = [] if reader.tokenizer is None else [tokens.ids for tokens in reader.read(SAMPLE)]
    ids = [tokens for tokens in sequences if len(tokens)]
    if not ids:
        length = min(_LENGTH, reader.max_positions)
        ids = list(np.random.RandomState(0).randint(0, reader.vocabulary, (_SEQUENCES, length)))
    return Inputs.of(pack(ids), device), len(ids)


def _smallest_cosine(vectors: torch.Tensor, expected: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(vectors.double(), expected.double(), dim=-1).min().item()
