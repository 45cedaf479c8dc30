"""Recording: an ATen call becomes a step of the trace. C++ in csrc/ records the calls that repeat known steps."""
