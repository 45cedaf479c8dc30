"""Old scripts, unchanged: `torch_xla`, `torch_xla_py`, `lazy_tensor_core` and `torch._lazy` served from here.

    ltc-launch --compat train.py
    python -m ltc_dist.compat train.py --lr 0.1
    import ltc_dist.compat                          # the first line of the script

After that import these names are served by thin modules of this package over `ltc_core` and `ltc_dist`, and the device
has the name that such scripts expect. Nothing else changes. Without the import nothing changes at all.
"""

from ltc_core.runtime import found_steps
from ltc_dist import libraries
from ltc_dist.compat import (
    buffer_donors,
    counters,
    dense_gradients,
    error_texts,
    gradient_norms,
    sharding_ops,
)
from ltc_dist.compat.finder import activate

__all__ = ["activate"]

found_steps.leave_alone()
activate()
buffer_donors.register()
counters.register()
dense_gradients.register()
error_texts.register()
gradient_norms.register()
sharding_ops.register()
libraries.serve_compat()
