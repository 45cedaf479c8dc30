"""The nodes of a subgraph called again as plain tensor code, so that a compiler can trace them."""
