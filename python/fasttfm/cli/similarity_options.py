"""The options of ``fasttfm finetune --task similarity``."""

from __future__ import annotations

from typing import Any

from fasttfm.cli.options import whole_numbers


def add_similarity_options(group: Any) -> None:
    """Adds the options that only this task has."""
    group.add_argument(
        "--temperature", type=float, default=0.05, metavar="T", help="temperature of the contrastive loss"
    )
    group.add_argument(
        "--mini-batch",
        type=int,
        metavar="N",
        help="examples per forward pass, for batches that do not fit into memory (gradient caching)",
    )
    group.add_argument(
        "--dimensions",
        type=whole_numbers,
        default=(),
        metavar="N,N,...",
        help="train vectors that keep only their first N elements, for each N (Matryoshka embeddings)",
    )
