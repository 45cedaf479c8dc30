"""Every kind of view, each as a function of one tensor: what the tests of views go through."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["VIEWS", "Make", "base_tensor"]

Make = Callable[[Tensor], Tensor]

VIEWS: dict[str, Make] = {
    "select": lambda t: t[1],
    "select_last": lambda t: t[..., -1],
    "slice": lambda t: t[1:3],
    "slice_with_step": lambda t: t[::2, 1::2],
    "negative_slice": lambda t: t[-3:-1, :-2],
    "slice_past_the_end": lambda t: t[2:100],
    "empty_slice": lambda t: t[3:1],
    "ellipsis_and_none": lambda t: t[..., None, 1],
    "mixed": lambda t: t[1:, None, -2, ::3],
    "narrow": lambda t: t.narrow(1, 1, 2),
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(1, 2, 0),
    "movedim": lambda t: t.movedim(0, -1),
    "mT": lambda t: t.mT,
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t[:, :1].squeeze(1),
    "squeeze_all": lambda t: t[:1, :1].squeeze(),
    "view": lambda t: t.view(-1, 2),
    "view_as": lambda t: t.view_as(torch.empty(6, 2, 5, device=t.device)),
    "flatten": lambda t: t.flatten(1),
    "unflatten": lambda t: t.unflatten(2, (5, 1)),
    "reshape": lambda t: t.reshape(3, -1),
    "ravel": lambda t: t.ravel(),
    "diagonal": lambda t: t.diagonal(1, 0, 2),
    "unfold": lambda t: t.unfold(2, 2, 2),
    "expand_as_itself": lambda t: t.expand(4, 3, 5),
    "chunk": lambda t: t.chunk(2, 2)[1],
    "split": lambda t: t.split([1, 3, 1], 2)[1],
    "tensor_split": lambda t: t.tensor_split(3)[2],
    "unbind": lambda t: t.unbind(1)[2],
    "as_strided": lambda t: t.as_strided((2, 3), (7, 2), 4),
    "as_strided_of_a_part": lambda t: t[1].as_strided((2, 2), (3, 1)),
    "view_dtype": lambda t: t.view(torch.int32),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "alias": lambda t: t[:],
    "twice": lambda t: t[1:].transpose(0, 1)[1],
    "three_times": lambda t: t.flatten(0, 1)[2:10].view(2, 4, 5)[:, ::2].permute(2, 0, 1),
}


def base_tensor(device: torch.device) -> Tensor:
    return torch.arange(60.0, device=device).view(4, 3, 5).clone()
