"""The kernels: one folder per op, one file per language. Installed as ``fasttfm.kernels``."""
