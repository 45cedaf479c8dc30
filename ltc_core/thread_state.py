"""The thread state of PyTorch for the device's own calls; it does not depend on the modes of the calling thread.

Inference mode, grad mode, autocast, dispatch modes, function modes (a default device is one) and levels of torch.func
belong to the user's ops. Runs, uploads, shape inference and fetches compute on ordinary tensors in the state of a new
thread, with grad mode off. `in_own_state` wraps such a function. Used by every file that calls PyTorch on the device's
behalf; `runtime.launch` wraps the runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["in_own_state", "num_dispatch_modes", "num_function_modes"]

P = ParamSpec("P")
R = TypeVar("R")

_keys = torch._C._ForceDispatchKeyGuard
_inference_mode = torch._C._InferenceMode
_no_function_modes = torch._C.DisableTorchFunction
_set_grad_enabled = torch._C._set_grad_enabled
num_dispatch_modes = torch._C._len_torch_dispatch_stack
num_function_modes = torch._C._len_torch_function_stack


def _keys_of_a_new_thread() -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    """Return the dispatch keys that a new thread includes and excludes."""
    found: list[torch._C.DispatchKeySet] = []

    def look() -> None:
        found.append(torch._C._dispatch_tls_local_include_set())
        found.append(torch._C._dispatch_tls_local_exclude_set())

    thread = threading.Thread(target=look, name="ltc-keys")
    thread.start()
    thread.join()
    return found[0], found[1]


_included, _excluded = _keys_of_a_new_thread()


def in_own_state(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function`, so that each call runs in the state of a new thread, with grad mode off.

    The calling thread's state is as before when the call returns or raises. What PyTorch keeps for the whole process
    (default dtype, deterministic algorithms) stays the user's.

    Cost: as much as entering `torch.no_grad()`, about 1 us a call.
    """

    # C++ guards in a `with`: each is entered as soon as it is made, so that an interrupt leaves none active.
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if num_dispatch_modes():  # `detach` looks for modes, even if the keys exclude them
            with _disable_current_modes():
                return run(*args, **kwargs)
        with _keys(_included, _excluded), _inference_mode(False), _no_function_modes():
            _set_grad_enabled(False)  # the guard of inference mode restores it
            return function(*args, **kwargs)

    return run
