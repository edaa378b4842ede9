"""The ops. Each is a checked public function, registered with torch.library, served by one of several backends."""

from fasttfm.kernels.common.index_errors import check_errors
from fasttfm.ops.embedding import embedding
from fasttfm.ops.layer_norm import layer_norm
from fasttfm.ops.pack import (
    cu_seqlens_from_lengths,
    cu_seqlens_from_mask,
    pack,
    position_ids_from_cu_seqlens,
    token_indices_from_mask,
    unpack,
)

__all__ = [
    "check_errors",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_mask",
    "embedding",
    "layer_norm",
    "pack",
    "position_ids_from_cu_seqlens",
    "token_indices_from_mask",
    "unpack",
]
