"""ATen op by op, in C++ (`replay`) or in Python."""
