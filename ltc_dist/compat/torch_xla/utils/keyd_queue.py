"""`torch_xla.utils.keyd_queue`: queues between threads, of bounded size, that can be closed at both ends."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable
from typing import Any

__all__ = ["KeydQueue", "Queue", "QueueBase"]


class QueueBase:
    """Base of both queues.

    Args:
        maxsize: items that may wait.
    """

    def __init__(self, maxsize: int = 1024) -> None:
        self._maxsize = maxsize
        self._changed = threading.Condition()
        self._close_read = self._close_write = False

    def max_size(self) -> int:
        """Return the number of items that may wait."""
        return self._maxsize

    def close(self) -> None:
        """Wake all waiting `put` and `get` calls; items put from now on are dropped."""
        with self._changed:
            self._close_read = self._close_write = True
            self._changed.notify_all()

    def close_write(self) -> None:
        """End the input: `get` returns the waiting items, then None."""
        with self._changed:
            self._close_write = True
            self._changed.notify_all()


class Queue(QueueBase):
    """First in, first out."""

    def __init__(self, maxsize: int = 1024) -> None:
        super().__init__(maxsize)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add an item; wait for room."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._maxsize or self._close_read)
            if not self._close_read:
                self._items.append(item)
                self._changed.notify_all()

    def get(self) -> Any:
        """Return the oldest item, waiting for one; None after the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._close_write)
            self._changed.notify_all()
            return self._items.popleft() if self._items else None


class KeydQueue(QueueBase):
    """Items are taken by their keys. An item that a `get` waits for enters even a full queue."""

    def __init__(self, maxsize: int = 1024) -> None:
        super().__init__(maxsize)
        self._items: dict[Hashable, Any] = {}
        self._waited_for: Counter[Hashable] = Counter()

    def put(self, key: Hashable, item: Any) -> None:
        """Add an item under a key; wait for room, unless the key is waited for."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    len(self._items) < self._maxsize or self._waited_for[key] or self._close_read
                )
            )
            if not self._close_read:
                self._items[key] = item
                self._changed.notify_all()

    def get(self, key: Hashable) -> Any:
        """Return the item of a key, waiting for it; None after the queue was closed."""
        with self._changed:
            self._waited_for[key] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: key in self._items or self._close_write)
            self._waited_for -= Counter([key])  # drop the key: no `get` waits for it
            self._changed.notify_all()
            return self._items.pop(key, None)
