"""The device as PyTorch sees it: indices, streams, generators, pinned memory, `torch.<name>`.

In: a hooks object that knows the runtime (`module.DeviceHooks`). Out: a registered backend.
Layers: csrc/ltc_device.cpp | build (compiles it) | module (`torch.<name>`) | register.
"""
