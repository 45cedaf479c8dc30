"""Handles: values that never change, cells that share memory, views that see a part of a cell."""

import pytest
import torch

import ltc_core as ltc
from ltc_core.graph.ir import TensorMeta, ViewStep
from ltc_core.record.trace import is_stale
from ltc_core.runtime.devices import context
from ltc_core.tensor.buffer import Buffer, MemoryCounter
from ltc_core.tensor.handles import Cell, Value, View, base_of, lens_of
from ltc_core.tensor.lazy_tensor import LazyTensor

aten = torch.ops.aten


@pytest.fixture
def x() -> LazyTensor:
    found = torch.arange(6.0).view(2, 3).to(ltc.lazy_device())
    assert isinstance(found, LazyTensor)
    return found


def handle(t: torch.Tensor) -> Cell | View:
    assert isinstance(t, LazyTensor)
    return t._h


# -- the parts -------------------------------------------------------------------------------------


def test_a_value_is_a_number_of_a_trace_or_a_buffer() -> None:
    pending = Value(7, 3)
    assert (pending.epoch, pending.index, pending.buffer) == (7, 3, None)
    buffer = Buffer.ready(MemoryCounter(), torch.ones(2), 8)
    backed = Value.of(buffer)
    assert backed.buffer is buffer
    assert backed.epoch == -1  # of no trace


def test_rebinding_a_cell_is_seen_by_its_views() -> None:
    trace = context(0).trace
    meta = TensorMeta.packed((2, 3), torch.float32)
    cell = Cell(trace, Value(trace.epoch, 0), meta)
    lens = (ViewStep(aten.select.int, (0, 1)),)
    view = View(cell, lens, TensorMeta.packed((3,), torch.float32), Value(trace.epoch, 1))
    assert not is_stale(view, trace.epoch)
    cell.rebind(Value(trace.epoch, 2))
    assert cell.version == 1
    assert is_stale(view, trace.epoch)
    assert not is_stale(cell, trace.epoch)


def test_base_and_lens_of_either_kind_of_handle(x: LazyTensor) -> None:
    row = x[1]
    assert base_of(handle(x)) is handle(x)
    assert lens_of(handle(x)) == ()
    assert base_of(handle(row)) is handle(x)
    assert [step.op for step in lens_of(handle(row))] == [aten.select.int]


# -- who shares what -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda t: t.detach(), lambda t: t.data, lambda t: t.alias() if hasattr(t, "alias") else t.data],
    ids=["detach", "data", "alias"],
)  # fmt: skip
def test_aliases_share_the_cell(x: LazyTensor, make) -> None:
    alias = make(x)
    assert base_of(handle(alias)) is base_of(handle(x))
    alias.add_(1)
    assert torch.equal(x.cpu(), torch.arange(6.0).view(2, 3) + 1)


def test_a_clone_shares_the_value_until_one_is_written(x: LazyTensor) -> None:
    twin = x.clone()
    assert handle(twin) is not handle(x)
    assert handle(twin).value is handle(x).value
    x.add_(1)
    assert handle(twin).value is not handle(x).value
    assert torch.equal(twin.cpu(), torch.arange(6.0).view(2, 3))
    assert torch.equal(x.cpu(), torch.arange(6.0).view(2, 3) + 1)


def test_a_view_of_a_view_is_one_longer_lens_on_the_same_cell(x: LazyTensor) -> None:
    part = x.t()[1]
    assert base_of(handle(part)) is handle(x)
    assert [step.op for step in lens_of(handle(part))] == [aten.t.default, aten.select.int]


def test_a_write_through_a_view_rebinds_the_cell(x: LazyTensor) -> None:
    before = handle(x).value
    row, column = x[1], x[:, 2]
    row.zero_()
    assert handle(x).value is not before
    assert torch.equal(column.cpu(), torch.tensor([2.0, 0.0]))
    assert torch.equal(row.cpu(), torch.zeros(3))


def test_an_old_value_stays_what_it_was(x: LazyTensor) -> None:
    before = handle(x).value
    x.add_(1)
    old = Cell(handle(x).trace, before, handle(x).meta)
    from_old = context(0).value_data(old, "Test")
    assert torch.equal(from_old, torch.arange(6.0).view(2, 3))


def test_a_view_made_before_a_cut_sees_writes_after_it(x: LazyTensor) -> None:
    row = x[0]
    ltc.mark_step()
    x.mul_(10)
    ltc.mark_step()
    row.add_(1)
    ltc.mark_step()
    assert torch.equal(row.cpu(), torch.tensor([1.0, 11.0, 21.0]))
    assert torch.equal(x.cpu()[1], torch.tensor([30.0, 40.0, 50.0]))


def test_a_view_keeps_its_cell_alive_and_costs_no_memory(x: LazyTensor) -> None:
    ltc.mark_step(wait=True)
    before = context(0).memory.used_bytes
    row = x[1]
    view = row.view(3, 1)
    ltc.mark_step(wait=True)
    assert context(0).memory.used_bytes == before
    del x, row
    assert torch.equal(view.cpu(), torch.tensor([[3.0], [4.0], [5.0]]))


def test_memory_nobody_wrote_is_a_value_without_buffer() -> None:
    t = torch.empty(3, device=ltc.lazy_device())
    assert handle(t).value.buffer is None
    t.fill_(2)
    assert torch.equal(t.cpu(), torch.full((3,), 2.0))
