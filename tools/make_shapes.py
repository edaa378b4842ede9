#!/usr/bin/env python3
"""Makes the labelled images that ship with the package: grey images of six shapes with random parameters.

    python tools/make_shapes.py [FOLDER]

Every image has its own position, size, angle, brightness, background and noise. The output is deterministic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "python" / "fasttfm" / "data" / "corpus" / "tasks"
SIZE = 28
COUNTS = {"train": 600, "dev": 150}
SEEDS = {"train": 1, "dev": 2}
Plane = np.ndarray


def _disc(x: Plane, y: Plane) -> Plane:
    return x**2 + y**2 < 1


def _ring(x: Plane, y: Plane) -> Plane:
    distance = x**2 + y**2
    return (distance < 1) & (distance > 0.4)


def _square(x: Plane, y: Plane) -> Plane:
    return np.maximum(abs(x), abs(y)) < 0.85


def _frame(x: Plane, y: Plane) -> Plane:
    distance = np.maximum(abs(x), abs(y))
    return (distance < 0.9) & (distance > 0.5)


def _triangle(x: Plane, y: Plane) -> Plane:
    return (y < 0.7) & (y > 2 * abs(x) - 1)


def _cross(x: Plane, y: Plane) -> Plane:
    return (np.minimum(abs(x), abs(y)) < 0.28) & (np.maximum(abs(x), abs(y)) < 1)


SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "cross": _cross,
    "disc": _disc,
    "frame": _frame,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
}


def draw(shape: str, generator: np.random.Generator) -> np.ndarray:
    """One image, uint8 [SIZE, SIZE]."""
    radius = generator.uniform(7.5, 11)
    centre = generator.uniform(12, 16, size=2)
    angle = generator.uniform(-0.35, 0.35)
    background, brightness = generator.integers(0, 40), generator.integers(200, 256)
    rows, columns = np.indices((SIZE, SIZE)) + 0.5
    x, y = (columns - centre[1]) / radius, (rows - centre[0]) / radius
    turned = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    picture = np.where(SHAPES[shape](*turned), brightness, background)
    noise = generator.integers(-16, 17, size=(SIZE, 1)) // 4 * 4
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


def make(part: str) -> dict[str, np.ndarray]:
    """The arrays of a set: images, label ids, and label names."""
    generator = np.random.default_rng(SEEDS[part])
    names = list(SHAPES)
    labels = np.arange(COUNTS[part]) % len(names)
    generator.shuffle(labels)
    images = np.stack([draw(names[label], generator) for label in labels])
    return {"images": images, "labels": labels.astype(np.uint8), "names": np.array(names)}


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else FOLDER
    for part in COUNTS:
        np.savez_compressed(folder / f"image-{part}.npz", **make(part))


if __name__ == "__main__":
    main(sys.argv[1:])
