"""The state that decides the order of a loader's samples: its random generators and epochs.

A `RandomSampler` draws from a generator of its own, a `DistributedSampler` shuffles by its epoch, and both may stand in
a batch sampler or a dataset. `order_of` finds them all in a loader, each once; `set_order` puts them back. The host's
global generators decide where a sampler has none. Used by `loader`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ltc_core.errors import LoaderError, listed

__all__ = [
    "base_seed",
    "draws_base_seed",
    "global_states",
    "order_of",
    "set_global_states",
    "set_order",
    "with_states",
]

_log = logging.getLogger("ltc")

_MAX_DEPTH = 6
_MAX_PARTS = 64  # of a list of datasets or samplers; a longer list holds samples
# Attributes of a loader that are searched whatever their class: a wrapper need not be a subclass of PyTorch's.
_PARTS = {"sampler", "batch_sampler", "dataset", "loader", "dataloader", "base_dataloader"}


def order_of(loader: Any) -> dict[str, Any]:
    """State of each random generator and each epoch that a loader holds, by its path in the loader.

    Cost: a walk over the attributes of the loader, its samplers and datasets; no sample is looked at.
    """
    return {path: _state_of(held) for path, held in _sources(loader).items()}


def set_order(loader: Any, order: Mapping[str, Any], in_mid_epoch: bool) -> None:
    """Restore the generators and epochs of a loader from `order_of`.

    Args:
        in_mid_epoch: the epoch continues, so every source must be there.

    Raises:
        LoaderError: in mid-epoch, the loader has other sources than the one the state is of.
    """
    sources = _sources(loader)
    if in_mid_epoch and sources.keys() != order.keys():
        raise LoaderError(
            "the epoch cannot go on: its samples would come in another order",
            got=f"the state has {listed(sorted(order)) or 'no generator'}, "
            f"this loader {listed(sorted(sources)) or 'none'}",
            next="make the loader with the samplers and generators it had, or leave its state out to begin an epoch.",
        )
    for path, state in order.items():
        if path not in sources:
            continue
        held = sources[path]
        if in_mid_epoch and isinstance(held, _Epoch) and held.value != state:
            _log.warning(
                "%s was set to %s, and the epoch that goes on is %s: its samples come", path, held.value, state
            )  # fmt: skip
        _set_state(held, state)


# -- sources ---------------------------------------------------------------------------------------


class _Epoch:
    """The epoch of a sampler or a dataset that has `set_epoch`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @property
    def value(self) -> int:
        found: int = self._owner.epoch
        return found

    def set(self, value: int) -> None:
        self._owner.set_epoch(value)


def _sources(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def search(held: Any, path: str, depth: int) -> None:
        if id(held) in seen or depth > _MAX_DEPTH:
            return
        seen.add(id(held))
        if _is_generator(held):
            found[path] = held
            return
        if isinstance(held, list | tuple):
            if len(held) <= _MAX_PARTS:
                for k, part in enumerate(held):
                    if isinstance(part, Sampler | Dataset | DataLoader) or _is_generator(part):
                        search(part, f"{path}[{k}]", depth + 1)
            return
        attributes = getattr(held, "__dict__", {})
        prefix = f"{path}." if path else ""
        if type(attributes.get("epoch")) is int and callable(getattr(held, "set_epoch", None)):
            found[f"{prefix}epoch"] = _Epoch(held)
        for name in sorted(attributes):
            part = attributes[name]
            if (
                name in _PARTS
                or isinstance(part, Sampler | Dataset | DataLoader | list | tuple)
                or _is_generator(part)
            ):
                search(part, f"{prefix}{name}", depth + 1)

    search(loader, "", 0)
    return found


def _is_generator(held: Any) -> bool:
    if isinstance(held, torch.Generator):
        return held.device.type == "cpu" and held is not torch.default_generator
    if isinstance(held, random.Random):
        return not isinstance(held, random.SystemRandom)  # it has no state
    return _is_of_numpy(held)


def _is_of_numpy(held: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(held, numpy.random.Generator | numpy.random.RandomState)


def _state_of(held: Any) -> Any:
    if isinstance(held, _Epoch):
        return held.value
    if isinstance(held, torch.Generator):
        return held.get_state()
    if isinstance(held, random.Random):
        return held.getstate()
    if hasattr(held, "bit_generator"):
        return _without_arrays(held.bit_generator.state)
    return _without_arrays(held.get_state(legacy=False))


def _set_state(held: Any, state: Any) -> None:
    if isinstance(held, _Epoch):
        held.set(state)
    elif isinstance(held, torch.Generator):
        held.set_state(state)
    elif isinstance(held, random.Random):
        held.setstate(state)
    elif hasattr(held, "bit_generator"):
        held.bit_generator.state = _with_arrays(state)
    else:
        held.set_state(_with_arrays(state))


def _without_arrays(value: Any) -> Any:
    """A numpy generator's state with lists of integers in the place of its arrays, as a checkpoint holds them."""
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    if hasattr(value, "dtype") and getattr(value, "ndim", 0) > 0:
        return {"array": str(value.dtype), "values": value.tolist()}
    return value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"array", "values"}:
        return sys.modules["numpy"].array(value["values"], dtype=value["array"])
    if isinstance(value, dict):
        return {key: _with_arrays(part) for key, part in value.items()}
    return value


# -- what is global --------------------------------------------------------------------------------


def global_states() -> dict[str, Any]:
    """States of the generators that a sampler without one of its own draws from: PyTorch's, Python's, numpy's."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = _without_arrays(numpy.random.get_state(legacy=False))
    return found


@contextlib.contextmanager
def with_states(states: Mapping[str, Any]) -> Iterator[None]:
    """Set the states of the global generators for the block, and restore their own after it."""
    now = global_states()
    set_global_states(states)
    try:
        yield
    finally:
        set_global_states(now)


def set_global_states(states: Mapping[str, Any]) -> None:
    """Set the global generators to states from `global_states`."""
    torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_with_arrays(states["numpy"]))


# -- the seed of worker processes ------------------------------------------------------------------


def draws_base_seed(loader: Any) -> bool:
    """Whether the next pass over a loader draws a seed for worker processes first; persistent ones keep theirs."""
    return getattr(loader, "_iterator", None) is None


@contextlib.contextmanager
def base_seed(loader: Any, draws: bool) -> Iterator[None]:
    """Make a pass that begins in this block draw the workers' seed only if the pass that it continues did.

    Otherwise the sampler, which draws from the same generator, would draw another number.
    """
    has_processes = draws_base_seed(loader)
    if draws == has_processes or not isinstance(loader, DataLoader):
        yield
        return
    if draws:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        yield
        return
    kept, loader.generator = loader.generator, torch.Generator()
    try:
        yield
    finally:
        loader.generator = kept
