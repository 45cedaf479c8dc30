"""What the compiler's process does to a subgraph before and while PyTorch compiles it."""
