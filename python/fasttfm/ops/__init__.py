"""The ops. Each is a checked public function, registered with torch.library, served by one of several backends."""

from fasttfm.ops.layer_norm import layer_norm

__all__ = ["layer_norm"]
