"""ATen op by op: in Python at the first run of a graph, in C++ (`replay`) from the second on."""
