"""Old scripts, unchanged: `torch_xla`, `torch_xla_py`, `lazy_tensor_core` and `torch._lazy` served from here.

    ltc-launch --compat train.py
    python -m ltc_dist.compat train.py --lr 0.1
    import ltc_dist.compat                          # the first line of the script

From then on these names import modules of this package, thin ones over `ltc_core` and `ltc_dist`, and the device has
the name that such scripts expect. Nothing else is changed, and nothing is without this import.
"""

from ltc_dist.compat.finder import activate

__all__ = ["activate"]

activate()
