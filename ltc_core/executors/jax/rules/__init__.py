"""What JAX computes for each core op of ATen, a file for each family. Importing this fills `table.RULES`."""

from ltc_core.executors.jax.rules import (  # noqa: F401 - each fills the table
    composite,
    convolution,
    elementwise,
    indexing,
    layout,
    linear,
    pooling,
    recurrent,
    reductions,
    sharding,
    special,
)
