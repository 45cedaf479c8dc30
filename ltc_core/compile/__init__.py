"""What compiled executors share: schedule, subgraphs, retracing, decompositions, scalar inputs, random numbers."""
