"""A compile service that answers when a test tells it to; its libraries run the lowered FX graph as it is."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ltc_core import metrics
from ltc_core.executors.inductor import tier_report, tiers
from ltc_core.executors.inductor.compiler.request import decode
from ltc_core.executors.inductor.compiler.service import Outcome
from ltc_core.executors.inductor.lowering.lower import lower
from ltc_core.settings import settings

__all__ = ["Interpreted", "Service", "use"]


class Service:
    """Takes requests and answers when told to."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[bytes, Callable[[Outcome], None]]] = {}
        self.asked = 0
        self.cached: set[str] = set()
        self.problem = ""
        self.answers_at_once = False
        self.place = Path()

    def available(self) -> str:
        return self.problem

    def is_cached(self, key: str) -> bool:
        return key in self.cached

    def submit(
        self, key: str, payload: bytes, done: Callable[[Outcome], None], urgent: bool
    ) -> None:
        self.asked += 1
        self.requests[key] = (payload, done)
        if self.answers_at_once:
            self.answer()

    def answer(self, outcome: Outcome | None = None) -> None:
        # In a thread of its own, as the service's: without the modes of the thread that trains.
        thread = threading.Thread(target=self._answer, args=(outcome,))
        thread.start()
        thread.join()

    def _answer(self, outcome: Outcome | None) -> None:
        requests, self.requests = self.requests, {}
        for key, (payload, done) in requests.items():
            facts = {"library": "model.so", "returned": [], "kernels": []}
            built = Outcome(Path(key), facts=facts)
            MODELS[key] = lower(decode(payload).subgraph, "cpu")
            built.facts["returned"] = list(MODELS[key].returned)
            done(outcome or built)


MODELS: dict[str, Any] = {}


class Interpreted:
    def __init__(self, path: Path, metas: Any, device: str) -> None:
        self.module = MODELS[path.parent.name].module

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(self.module(*tensors))


@contextlib.contextmanager
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Compile by a service of this block; no reason why something is not compiled is known in it."""
    made = Service()
    monkeypatch.setattr(tiers, "service", lambda: made)
    monkeypatch.setattr(tiers, "load", Interpreted)
    monkeypatch.setattr(tier_report, "_reasons", {})
    monkeypatch.setattr(tiers, "_refused_ops", set())
    metrics.clear_all()
    with (
        tempfile.TemporaryDirectory() as place,
        settings.override(compile="async", compile_after=3),
    ):
        made.place = Path(place)
        yield made
    MODELS.clear()
