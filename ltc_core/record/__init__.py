"""From the call that ATen makes to a step of the trace; C++ in csrc/ records what was recorded before."""
