"""Graphs on XLA through JAX: on a CPU, a GPU or a TPU. Imported only where LTC_EXECUTOR=jax."""
