"""The ops. Each is a checked public function, registered with torch.library, served by one of several backends."""

from fasttfm.kernels.common.index_errors import check_errors
from fasttfm.ops.embedding import embedding
from fasttfm.ops.layer_norm import layer_norm

__all__ = ["check_errors", "embedding", "layer_norm"]
