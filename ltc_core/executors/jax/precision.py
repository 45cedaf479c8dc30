"""How exactly a TPU and a GPU multiply float32: as `torch.set_float32_matmul_precision` says, also in convolutions.

"highest", PyTorch's default, is as exact as float32 on a CPU. A TPU multiplies bfloat16: six products stand for one of
float32 then, three for "high" (16 bits of each number), one for "medium" (8 bits). A CPU has float32 in any case.
"""

from __future__ import annotations

import torch
from jax import lax

__all__ = ["precision"]

# It knows the older and the newer settings, which may be mixed.
_of = torch._C._get_fp32_precision_getter
_PRECISIONS = {
    "ieee": lax.Precision.HIGHEST,
    "tf32": lax.Precision.HIGH,
    "bf16": lax.Precision.DEFAULT,
}


def precision() -> lax.Precision:
    """The precision of products in a program that is traced now; it is part of what the program depends on."""
    places = (("mkldnn", "matmul"), ("mkldnn", "all"), ("generic", "all"))
    named = next((name for place in places if (name := _of(*place)) != "none"), "ieee")
    return _PRECISIONS[named]
