"""Between a graph and the executors: plans, passes, subgraphs, what fails and what is left."""
