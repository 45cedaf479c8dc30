"""Graphs compiled by XLA and run by PJRT, through torch_xla's native library."""
