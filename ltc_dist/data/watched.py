"""Watches whether reading batches draws from the global random generators, and says which thread has to read.

Reading ahead is for passes that do not draw. Where the dataset draws, each batch is read in the training thread when it
is asked for, as in a plain loop: in the same order as the script's own draws, and no batch too many. `Draws` decides
by the generators before and after each read; the first batch of a pass is always read there. Used by `prefetch`.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

__all__ = ["Draws", "Watched"]

_MAX_TRIALS = 16
_LATE = (
    "[ltc] the dataset draws from a global generator (of random, numpy or torch), but did not for the first batch: it "
    "is read in the training thread from now on. Batches before were read ahead: where the script draws, too, their "
    "numbers may differ from run to run. Next: draw for the first batch, or from a generator of the dataset's own"
)
_BYTES_OF_MT19937 = 4 * 624 + 4  # its numbers, and the position in them
_DRAW_AT_FIRST_ONLY = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Draws:
    """Whether reading a loader draws from the global generators; kept from one pass to the next.

    A generator that changes during a read in the background may have been drawn from by the script. So the next batch
    is read in the training thread, which cannot draw meanwhile. If a generator changes again, the dataset draws, and
    all later batches are read there. Trials without a draw end after 16: then the script is taken to draw.

    Attributes:
        are_known: the dataset draws.
    """

    def __init__(self, are_known: bool = False) -> None:
        self.are_known = are_known
        self._is_trial_due = False
        self._num_trials = 0

    def begin(self) -> None:
        """Begin a pass over a loader."""
        self._is_trial_due = False

    @property
    def need_calling_thread(self) -> bool:
        """Whether the next batch is to be read in the training thread."""
        return self.are_known or self._is_trial_due

    @property
    def are_decided(self) -> bool:
        """Whether reads need not be compared."""
        return self.are_known or (self._num_trials >= _MAX_TRIALS and not self._is_trial_due)

    def note(self, has_changed: bool, is_in_background: bool, is_of_order: bool = False) -> None:
        """Note whether a generator changed while a batch was read.

        Args:
            is_of_order: the first read, which may have drawn the order of the samples.
        """
        if not has_changed:
            self._is_trial_due = False
        elif is_in_background or is_of_order:
            self._is_trial_due = self._num_trials < _MAX_TRIALS
            self._num_trials += is_in_background
        elif not self.are_known:
            self.are_known = True
            if self._num_trials and self._is_trial_due:
                print(_LATE, file=sys.stderr, flush=True)


class Watched:
    """The batches of a pass, with what reading them draws noted in `draws`. Made in the training thread."""

    def __init__(self, batches: Iterator[Any], draws: Draws) -> None:
        self.batches = batches
        self._draws = draws
        self._thread_id = threading.get_ident()
        self._num_read = 0
        sampler = getattr(batches, "_index_sampler", None)
        self._draws_order_at_first = (
            type(getattr(sampler, "sampler", sampler)) in _DRAW_AT_FIRST_ONLY
        )
        if isinstance(batches, _SingleProcessDataLoaderIter):
            batches._dataset_fetcher = _WatchedFetcher(
                batches._dataset_fetcher, draws, self._thread_id
            )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        is_first = self._num_read == 0
        self._num_read += 1
        if self._draws.are_decided or (is_first and self._draws_order_at_first):
            return next(self.batches)
        before = _states()
        batch = next(self.batches)
        is_in_background = threading.get_ident() != self._thread_id
        self._draws.note(_differ(before, _states()), is_in_background, is_first)
        return batch


class _WatchedFetcher:
    """Reads the samples of given indices: what is drawn here, the dataset draws and not the sampler."""

    def __init__(self, fetcher: Any, draws: Draws, thread_id: int) -> None:
        self._fetcher = fetcher
        self._draws = draws
        self._thread_id = thread_id

    def fetch(self, index: Any) -> Any:
        is_in_background = threading.get_ident() != self._thread_id
        if self._draws.are_decided or is_in_background:  # there, `Watched` compares
            return self._fetcher.fetch(index)
        before = _states()
        batch = self._fetcher.fetch(index)
        self._draws.note(_differ(before, _states()), False)
        return batch


def _states() -> tuple[Any, ...]:
    """States of the global generators, to be compared.

    Cost: 11 us. It was 72 us with `numpy.random.get_state()`, which makes integers of the state; a batch is compared
    twice. The second of two normal numbers, which numpy keeps from the first, leaves no trace here.
    """
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), _state_of_numpy()


def _state_of_numpy() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator) is numpy.random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _BYTES_OF_MT19937)
    return repr(generator.state)  # set with numpy.random.set_bit_generator


def _differ(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether a generator was drawn from; not whether numpy was imported."""
    return any(a is not None and a != b for a, b in zip(before, after, strict=True))
