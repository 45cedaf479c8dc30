"""What the device did in a `with` block, from the counters the user sees too.

Tests pin these numbers: ops recorded, cuts by reason, compiles, and ops that ran on the CPU.
"""

from types import TracebackType

from ltc_core import metrics
from ltc_core.settings import settings


def _counters() -> dict[str, int]:
    return {name: metrics.counter_value(name) or 0 for name in metrics.counter_names()}


class Counting:
    """Counters that grew in the block: `ops`, `syncs` and `fallbacks` by name, `compiles`."""

    def __enter__(self) -> "Counting":
        self._before = _counters()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._grown = self.so_far()

    def so_far(self) -> dict[str, int]:
        now = _counters()
        return {n: v - self._before.get(n, 0) for n, v in now.items() if v != self._before.get(n)}

    def _with_prefix(self, prefix: str) -> dict[str, int]:
        return {n.removeprefix(prefix): v for n, v in self._grown.items() if n.startswith(prefix)}

    @property
    def ops(self) -> dict[str, int]:
        """Ops recorded, counted when they are cut."""
        return self._with_prefix(f"{settings.device_name}::")

    @property
    def syncs(self) -> dict[str, int]:
        """Cuts that had something to run, by reason."""
        return self._with_prefix("Sync.")

    @property
    def fallbacks(self) -> dict[str, int]:
        """Ops that ran on the CPU."""
        return self._with_prefix("aten::")

    def grown(self, name: str) -> int:
        """How often something was counted."""
        return self._grown.get(name, 0)

    @property
    def compiles(self) -> int:
        return self._grown.get("UncachedCompile", 0)
