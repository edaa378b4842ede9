"""Vectors in fewer bits: the rounding of sentence-transformers, and sessions and their settings with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttfm.inference import EmbedSettings, Session
from fasttfm.inference.quantization import PRECISIONS, quantize_vectors, restore_vectors, vector_ranges

TEXTS = ["Peace and commerce with all nations.", "", "War.", "The army and the navy of the United States."]


def some(rows: int = 40, width: int = 20) -> np.ndarray:
    vectors = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    vectors[:, 3] = 0.25  # an element that is the same in all
    return vectors


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_rounding_is_that_of_sentence_transformers(precision: Any) -> None:
    library = pytest.importorskip("sentence_transformers.util", reason="the vectors are compared with its own")
    vectors, others = some(), some(8) * 1.5
    ranges = vector_ranges(vectors)
    for each in (vectors, others):  # the others have values out of the ranges
        found = quantize_vectors(each, precision, ranges)
        expected = library.quantize_embeddings(each, precision, ranges=ranges)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


def test_restored_vectors_are_in_the_middle_of_their_buckets() -> None:
    vectors = some()
    ranges = vector_ranges(vectors)
    for precision in ("int8", "uint8"):
        restored = restore_vectors(quantize_vectors(vectors, precision, ranges), precision, ranges)
        # Half a bucket, and fp32's rounding of values up to 4.
        assert (np.abs(restored - vectors) <= (ranges[1] - ranges[0]) / 510 + 2e-6).all()
        assert np.array_equal(restored[:, 3], vectors[:, 3])
    for precision in ("binary", "ubinary"):
        signs = restore_vectors(quantize_vectors(vectors, precision), precision)
        assert signs.shape == (40, 24)
        assert np.array_equal(signs[:, :20], np.where(vectors > 0, 1.0, -1.0))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_session_has_vectors_in_its_precision(precision: str, bert_directory: Path) -> None:
    with Session(bert_directory, device="cpu") as session:
        exact = session.encode(TEXTS)
    settings = EmbedSettings(precision=precision, ranges=vector_ranges(exact))
    expected = quantize_vectors(exact, precision, settings.ranges)
    with Session(bert_directory, settings=settings, device="cpu") as session:
        many = [text for text in TEXTS for _ in range(80)]  # more than a window
        for found in (
            session.encode(TEXTS),
            np.stack(list(session.stream(TEXTS))),
            np.stack([session.submit(text).result(60) for text in TEXTS]),
            session.encode(many)[::80],
        ):
            assert found.dtype == expected.dtype
            assert found.shape == (4, session.width)
            # Other batches sum in another order, which moves a value by up to 1e-5, into the next bucket or over zero.
            restored = restore_vectors(found, precision, settings.ranges)
            if precision in ("binary", "ubinary"):
                assert (restored == np.sign(exact))[np.abs(exact) > 1e-5].all()
            else:
                bucket = np.ptp(settings.ranges, axis=0) / 500 if precision.endswith("int8") else np.abs(exact) / 2**11
                assert (np.abs(restored - exact) <= bucket + 1e-5).all()
        assert session.encode(TEXTS[0]).shape == (session.width,)
        nothing = session.encode(iter([]))
        assert (nothing.dtype, nothing.shape) == (expected.dtype, (0, session.width))
        assert session.encode(TEXTS, output="states")[0].dtype == np.float32


def test_wrong_settings_are_named(bert_directory: Path) -> None:
    with pytest.raises(ValueError, match=r"EmbedSettings: precision: expected float32, .*, ubinary, got 'int4'"):
        EmbedSettings(precision="int4")
    ranges = "EmbedSettings: int8: ranges: expected the smallest and the largest value of each element, "
    for given, got in (
        (None, r"\[2, 64\].* got None"),
        (np.zeros((2, 8)), r"\[2, 64\], got float64 \[2, 8\]"),
        (np.stack([np.ones(64), np.zeros(64)]), r"whose first value is the larger one"),
    ):
        with pytest.raises(ValueError, match=ranges + ".*" + got):
            Session(bert_directory, settings=EmbedSettings(precision="int8", ranges=given), device="cpu")
    with pytest.raises(ValueError, match="at least two vectors of floating-point numbers, got float64"):
        vector_ranges(np.zeros((1, 4)))
