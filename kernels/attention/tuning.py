"""Tile sizes of attention's Triton kernels, by what a call looks like: a table, nothing is timed at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, and how a program is laid out."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # at most so many for a thread
    programs: int = 2  # for a multiprocessor, where programs own heads
    keys_first: bool = False  # scores keys by queries: not with dropout, whose draws lie along keys

    def options(self) -> dict[str, int | None]:
        return {
            "BLOCK_M": self.queries,
            "BLOCK_N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
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
        return Tiles(64, 64, 4, 1, keys_first=not dropout)
    return (
        Tiles(64, 64, 4, 2, keys_first=not dropout)
        if keys <= 64 or dropout
        else Tiles(64, 128, 8, 2, programs=1, keys_first=True)
    )


def query_tiles(head_dim: int, element_bytes: int, keys: int, dropout: bool) -> Tiles:
    if element_bytes == 4:
        return Tiles(32, 64, 4, 1)
    return Tiles(64, 64, 4, 2)


def key_tiles(head_dim: int, element_bytes: int, keys: int, dropout: bool) -> Tiles:
    if element_bytes == 4:
        return Tiles(32, 64, 4, 1)
    return Tiles(64, 64, 4, 1 if head_dim > 128 else 2, keys_first=not dropout)
