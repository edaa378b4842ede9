"""The ops. Each is a checked public function, registered with torch.library, served by one of several backends."""

from fasttfm.ops.dropout_add_layer_norm import dropout_add_layer_norm
from fasttfm.ops.layer_norm import layer_norm

__all__ = ["dropout_add_layer_norm", "layer_norm"]
