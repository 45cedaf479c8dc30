"""Graphs compiled by PyTorch's inductor in a separate process, and run as native code.

executor -> tiers -> partition                        when a graph is compiled, and which subgraphs of it
request -> service -> artifacts, compiler_process     keys of subgraphs, queue, cache on disk, start of the process
child -> build_artifact -> lower                      in the compiler's process only
launcher -> compiled_subgraph                         loads and runs the libraries
"""
