"""The ops. Each is a checked public function, registered with torch.library, served by one of several backends."""

from fasttfm.ops.column_sum import column_sum
from fasttfm.ops.layer_norm import layer_norm

__all__ = ["column_sum", "layer_norm"]
