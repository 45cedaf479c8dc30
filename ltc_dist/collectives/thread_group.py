"""The threads of one process that reduce with each other: all bring their tensors, the last one to come reduces them.

A `ThreadGroup` belongs to one run of `data_parallel`; each thread's graphs use a `ThreadTransport` of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core.errors import CollectiveError, CollectiveTimeoutError, first_line, listed
from ltc_core.graph.collective import COMBINE, is_scaled_first, plan_text
from ltc_core.runtime.worker import held_up
from ltc_core.settings import settings

__all__ = ["ThreadGroup", "Stopped", "ThreadTransport"]

Tensors = list[torch.Tensor]


class Stopped(CollectiveError):
    """Another thread has failed, and so this one was ended."""


class ThreadGroup:
    """Where `count` threads come together, op by op."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._brought: dict[int, tuple[str, Any]] = {}
        self._results: Sequence[Any] = ()
        self._round = 0
        self._left: set[int] = set()
        self._error: BaseException | None = None

    def exchange(
        self, position: int, plan: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """Bring a value, and give this thread's part of what `combine` makes of all values.

        Raises:
            CollectiveError: the threads are at different collectives, or one has ended.
            CollectiveTimeoutError: one has not come in time. All are stopped then.
        """
        with self._changed:
            self._check(position, plan)
            self._brought[position] = (plan, value)
            if len(self._brought) == self._count:
                self._combine(combine)
            else:
                number = self._round
                with held_up():
                    in_time = self._changed.wait_for(
                        lambda: self._round > number or self._error is not None or self._left,
                        settings.collective_timeout_s,
                    )
                if not in_time:
                    self._give_up(position, plan)
                if self._round == number:
                    self._check(position, plan)
            return self._results[position]

    def _check(self, position: int, plan: str) -> None:
        if self._error is not None:
            raise Stopped("another replica has failed", got=first_line(self._error))
        if self._left:
            raise CollectiveError(
                f"replica {min(self._left)} has ended while replica {position} waits for it",
                got=f"replica {position} is at {plan}",
                next="let all replicas take the same number of steps",
            )

    def _give_up(self, position: int, plan: str) -> None:
        missing = [k for k in range(self._count) if k not in self._brought]
        self._error = CollectiveTimeoutError(
            f"replica {missing[0]} did not come within {settings.collective_timeout_s:g} s",
            got=f"replica {position} is at {plan}; missing: replicas {listed(missing)}",
            next="let all replicas run the same collectives; LTC_COLLECTIVE_TIMEOUT_S sets how long one waits",
        )
        self._changed.notify_all()
        raise self._error

    def _combine(self, combine: Callable[[list[Any]], Sequence[Any]]) -> None:
        brought = [self._brought[k] for k in range(self._count)]
        self._brought = {}
        odd = next((k for k, (plan, _) in enumerate(brought) if plan != brought[0][0]), None)
        if odd is not None:
            self._error = CollectiveError(
                f"replica 0 and replica {odd} are at different collectives",
                got=f"replica 0: {brought[0][0]}\n       replica {odd}: {brought[odd][0]}",
                next="let all replicas run the same collectives, on tensors of the same sizes",
            )
            self._changed.notify_all()
            raise self._error
        self._results = combine([value for _, value in brought])
        self._round += 1
        self._changed.notify_all()

    @property
    def is_stopped(self) -> bool:
        return self._error is not None

    def leave(self, position: int) -> None:
        """Come no more: who waits for this thread is told."""
        with self._changed:
            self._left.add(position)
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Stop all other threads where they are."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class ThreadTransport:
    """One thread's way to the others; an `ltc_core.graph.collective.Replicated`.

    Args:
        devices: the index of each thread's device.
    """

    def __init__(self, group: ThreadGroup, position: int, devices: Sequence[int]) -> None:
        self._group = group
        self._position = position
        self._devices = tuple(devices)
        self._count = len(devices)

    def replicas(self, own: int, count: int) -> Sequence[int] | None:
        return self._devices if sorted(self._devices) == list(range(count)) else None

    def agree(self, plan: str) -> None:
        self._group.exchange(self._position, plan, None, lambda brought: brought)

    def launched(self, plan: str) -> None:
        # Who waits for a device holds Python's lock, which the others need to launch.
        self.agree(f"{plan} (launched)")

    def all_reduce(self, values: Tensors, kind: str, scale: float, label: str) -> Tensors:
        def combine(brought: list[Tensors]) -> list[Tensors]:
            scaled = [_reduced(column, kind, scale) for column in zip(*brought, strict=True)]
            return [scaled if k == 0 else _copies(scaled) for k in range(self._count)]

        return self._all(f"all_reduce {kind} of {label}:", values, combine)  # type: ignore[no-any-return]

    def broadcast(self, values: Tensors, root: int) -> Tensors:
        return self._all(  # type: ignore[no-any-return]
            f"broadcast from {root} of",
            values,
            lambda b: [_copies(b[root])] * self._count,
            copied=True,
        )

    def all_gather(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        def combine(brought: list[Tensors]) -> list[torch.Tensor]:
            return [torch.cat([t for (t,) in brought], dim)] * self._count

        return self._all(f"all_gather along dim {dim} of", [value], combine, copied=True)  # type: ignore[no-any-return]

    def reduce_scatter(
        self, value: torch.Tensor, kind: str, scale: float, dim: int
    ) -> torch.Tensor:
        (whole,) = self.all_reduce([value], kind, scale, "a tensor")
        return whole.chunk(self._count, dim)[self._position].contiguous()

    def all_to_all(self, value: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor:
        def combine(brought: list[Tensors]) -> list[torch.Tensor]:
            parts = [t.chunk(self._count, split_dim) for (t,) in brought]
            return [torch.cat([p[k] for p in parts], concat_dim) for k in range(self._count)]

        what = f"all_to_all from dim {split_dim} to dim {concat_dim} of"
        return self._all(what, [value], combine)  # type: ignore[no-any-return]

    def permute(self, value: torch.Tensor, pairs: list[int]) -> torch.Tensor:
        def combine(brought: list[Tensors]) -> list[torch.Tensor]:
            source_of = dict(zip(pairs[1::2], pairs[::2], strict=True))
            return [
                brought[source_of[k]][0].clone()
                if k in source_of
                else torch.zeros_like(brought[k][0])
                for k in range(self._count)
            ]

        return self._all(f"collective_permute {pairs} of", [value], combine)  # type: ignore[no-any-return]

    def _all(
        self,
        what: str,
        values: Tensors,
        combine: Callable[[list[Any]], Sequence[Any]],
        copied: bool = False,
    ) -> Any:
        found = self._group.exchange(self._position, plan_text(what, values), values, combine)
        if not copied:
            return found
        return found.clone() if isinstance(found, torch.Tensor) else _copies(found)


def _reduced(column: Sequence[torch.Tensor], kind: str, scale: float) -> torch.Tensor:
    if is_scaled_first(column[0].dtype, kind):
        return functools.reduce(COMBINE[kind], [t * scale for t in column])
    found = functools.reduce(COMBINE[kind], column)
    return found if scale == 1.0 else (found * scale).to(found.dtype)


def _copies(values: Tensors) -> Tensors:
    return [v.clone() for v in values]
