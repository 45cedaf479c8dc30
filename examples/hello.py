"""The first tensors on the lazy device: they behave like any other tensor.

    python examples/hello.py

Nothing runs when an op is called; printing a tensor is what makes its values needed.
"""

import torch

import ltc_core as ltc
from ltc_core.errors import DeviceMismatchError


def main() -> None:
    torch.manual_seed(0)
    device = ltc.lazy_device()
    t0 = torch.randn(2, 2, device=device)
    t1 = torch.randn(2, 2, device=device)
    print("device:", t0.device)
    print("t0 =", t0)
    print("t1 =", t1)
    print("t0 + t1 =", t0 + t1)
    print("t0.mm(t1) =", t0.mm(t1))

    l_in = torch.randn(10, device=device)
    linear = torch.nn.Linear(10, 20).to(device)
    print("linear(l_in) =", linear(l_in))

    print("\nA lazy tensor works with other lazy tensors only. A module that stayed on the CPU:")
    try:
        torch.nn.Linear(10, 20)(l_in)
    except DeviceMismatchError as error:
        print(f"DeviceMismatchError: {error}")


if __name__ == "__main__":
    main()
