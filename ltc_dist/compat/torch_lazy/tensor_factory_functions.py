"""`torch._lazy.tensor_factory_functions`: the functions of torch that make tensors of no other."""

import torch

__all__ = ["tensor_factory_functions"]

_NAMES = """
    arange bartlett_window blackman_window empty empty_strided eye from_file full hamming_window
    hann_window kaiser_window linspace logspace ones rand randint randn randperm range scalar_tensor
    tensor tril_indices triu_indices zeros
"""

tensor_factory_functions = tuple(getattr(torch, name) for name in _NAMES.split())
