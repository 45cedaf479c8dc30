"""Checkpoints. This module is `xser`: `save` and `load` are the streaming pair.

    import ltc_core.serialization as xser
    xser.save(model.state_dict(), path)            # a directory, one tensor at a time
    model.load_state_dict(xser.load(path))

The plain verbs, one file in PyTorch's format, are `ltc_core.save` and `ltc_core.load` (`plain`).
Layers: tree, cpu_copy, atomic, weights_only | plain | nodes, tensor_file, sealed, index, directory | legacy |
streaming.
"""

from ltc_core.serialization.streaming import load, save

__all__ = ["load", "save"]
