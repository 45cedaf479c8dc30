"""A branch of a random stream: the numbers for one part of a tensor that several processes share.

Each process has the same stream, and draws for its own part. Parts are to get different numbers, and copies of one part
equal ones. So a branch is derived from the stream's state and the part's number, and the stream goes on by one draw,
alike in all processes. It is an op of the graph: nothing is read. Used by `ltc_dist.libraries.dtensor`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ltc_core.graph.op_schema import OpSchema
from ltc_core.record.random_state import CpuStream, Stream, draw_on_cpu, generator, mixed
from ltc_core.record.recorder import recorder
from ltc_core.tensor.lazy_tensor import wrap
from ltc_core.thread_state import in_own_state

__all__ = ["branched"]

_library: Any = torch.library.Library("ltc_random", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("branch(Tensor(a!) state, int part) -> Tensor")


def _branch(state: torch.Tensor, part: int) -> torch.Tensor:
    seed, after = draw_on_cpu(state, _draw)
    state.copy_(after)
    return _seeded(seed, part).get_state()


def _draw(stream: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (1,), generator=stream))


def _seeded(seed: int, part: int) -> torch.Generator:
    return generator().manual_seed(mixed(seed, part))


_library.impl("branch", _branch, "CPU")
_library.impl("branch", lambda state, part: torch.empty_like(state), "Meta")
_record = recorder(OpSchema.of(torch.ops.ltc_random.branch.default))


@contextlib.contextmanager
def branched(stream: Stream, part: int) -> Iterator[None]:
    """Within the block, ops draw from the stream's branch for this part. Cost: an op on the stream's state."""
    if isinstance(stream, CpuStream):
        with _of_the_cpu(part):
            yield
        return
    branch = in_own_state(_record)((wrap(stream.cell), part), None)
    cell = stream.cell
    with stream.trace.lock:
        main = cell.value
        cell.rebind(branch._h.value)
    try:
        yield
    finally:
        with stream.trace.lock:
            cell.rebind(main)


@contextlib.contextmanager
def _of_the_cpu(part: int) -> Iterator[None]:
    shared = torch.default_generator
    seed = _draw(shared)
    main = shared.get_state()
    shared.set_state(_seeded(seed, part).get_state())
    try:
        yield
    finally:
        shared.set_state(main)
