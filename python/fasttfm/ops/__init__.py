"""The ops. Each is a checked public function, registered with torch.library, served by one of several backends."""

from fasttfm.ops.bias_gelu import bias_gelu
from fasttfm.ops.column_sum import column_sum
from fasttfm.ops.gelu_layer_norm import gelu_layer_norm
from fasttfm.ops.layer_norm import layer_norm

__all__ = ["bias_gelu", "column_sum", "gelu_layer_norm", "layer_norm"]
