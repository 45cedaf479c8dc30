"""Copies of the state of a loader that has a `state_dict` of its own.

Such a state may be the loader's live dict, which changes with each batch that is read. Prefetch reads ahead, so the
state after a batch is copied when that batch has been read. Used by `loader`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ltc_core.errors import LoaderError
from ltc_core.serialization.tree import tensors_of

__all__ = ["copied_state", "state_reader"]


@dataclass(frozen=True)
class _NoCopy:
    """A state that could not be copied; raised where it is asked for, so that training without checkpoints goes on."""

    error: Exception


def state_reader(loader: Any) -> Callable[[], Any]:
    """Return a function that copies the state of `loader` as it is when called.

    Cost: of each call, a copy of the state: 17 us for three numbers, 0.3 ms for a tensor of 4 MB.
    """

    def read() -> Any:
        state = loader.state_dict()
        try:
            return _copy(state)
        except Exception as error:
            return _NoCopy(error)

    return read


def copied_state(state: Any) -> Any:
    """Return a copy of a state that no later change of `state` reaches.

    Raises:
        LoaderError: the state holds something that cannot be copied.
    """
    try:
        if not isinstance(state, _NoCopy):
            return _copy(state)
        error = state.error
    except Exception as raised:
        error = raised
    raise LoaderError(
        "the loader's state cannot be copied",
        got=f"{type(error).__name__}: {error}",
        next="let its state_dict return numbers, texts, tensors, and lists and dicts of them.",
    ) from error


def _copy(state: Any) -> Any:
    # Tensors first: deepcopy copies the whole storage of a view, and refuses results of autograd.
    copies = {id(tensor): tensor.detach().clone() for tensor in tensors_of(state)}
    return copy.deepcopy(state, copies)
