"""The options of ``fasttfm finetune --task similarity``."""

from __future__ import annotations

from typing import Any

from fasttfm.cli.options import whole_numbers


def add_similarity_options(group: Any) -> None:
    """Adds the options that only this task has."""
    group.add_argument(
        "--vectors",
        choices=("mean", "splade", "tokens"),
        default="mean",
        help="what is trained: means of hidden states, SPLADE's weights of words (of a model with a masked-LM head) "
        "or vectors of tokens (ColBERT)",
    )
    group.add_argument(
        "--flops-weight",
        type=float,
        nargs=2,
        metavar=("Q", "D"),
        help="splade: weights of the FLOPS regulariser for first texts and for the others (default: 5e-5 3e-5)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="temperature of the contrastive loss and of margin MSE (default: 0.05; 1 for splade and tokens)",
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
