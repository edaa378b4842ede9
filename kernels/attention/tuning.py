"""Tile sizes of attention's Triton kernels, by what a call looks like: a table, so that nothing is timed at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, and how a program is laid out."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.queries,
            "BLOCK_N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


HEAD_KEYS = 1024  # up to here one program owns a head in backward


def forward_tiles(head_dim: int, element_bytes: int, keys: int, dropout: bool) -> Tiles:
    if element_bytes == 4:
        return Tiles(32, 64, 4, 1) if head_dim > 64 else Tiles(64, 64, 4, 1)
    if head_dim > 128:
        return Tiles(64, 64, 4, 2)
    return Tiles(128, 64 if keys <= 64 else 128, 8, 2)


def head_tiles(head_dim: int, element_bytes: int, keys: int, dropout: bool) -> Tiles:
    if element_bytes == 4:
        return Tiles(32, 64, 4, 1)
    if head_dim > 64:
        return Tiles(64, 64, 8, 1)
    return Tiles(64, 64 if keys <= 64 else 128, 8, 2)


def query_tiles(head_dim: int, element_bytes: int, keys: int, dropout: bool) -> Tiles:
    if element_bytes == 4:
        return Tiles(32, 64, 4, 1)
    return Tiles(64, 64, 4, 2)


def key_tiles(head_dim: int, element_bytes: int, keys: int, dropout: bool) -> Tiles:
    if element_bytes == 4:
        return Tiles(32, 64, 4, 1)
    if head_dim > 128:
        return Tiles(64, 64, 8, 1)
    return Tiles(64, 128, 8, 2)
