"""What the ops are made of: declarations, arguments, checks, backends, CUDA graphs and memory."""
