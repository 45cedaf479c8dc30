"""A call that was recorded at another place gets a copy of that step: the same key and node that Python makes there."""

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc_core as ltc
from ltc_core import source
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Ref, Scalar, Write, references
from ltc_core.graph.op_schema import OpSchema
from ltc_core.record import fast_path, modules
from ltc_core.runtime.devices import context
from ltc_core.settings import settings
from tests.core import child
from tests.core.beside_eager import assert_same
from tests.core.record.test_fast_path import calls_of_python

Program = Callable[[torch.device], Any]

pytestmark = pytest.mark.skipif(
    fast_path.extension.load() is None, reason="there is no C++ compiler to build it with"
)


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    ltc.mark_step()
    before = fast_path.enable(True)
    with settings.override(steps="marked"):
        yield
    fast_path.enable(before)


def native() -> Any:
    assert fast_path.install()
    return fast_path._native


def data(device: torch.device, *size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel())).view(size).to(device)


def numbers(device: torch.device) -> Any:
    x, y = data(device, 3), data(device, 3).to(torch.int64)
    found = [x + 1, x * 2.5, x.add(x, alpha=3), y * True, y / 2, x.clamp(1, None), x.pow(2.0)]
    found += [(x - 7) * 2, x.clamp(min=0.5), torch.where(x > 1, x, x + 1), y.to(torch.float64)]
    return [*found, *torch._foreach_mul([x, found[0]], [2.0, 3.0]), x.sum(0, dtype=torch.float64)]


def writes(device: torch.device) -> Any:
    x, z = data(device, 4, 4), data(device, 4, 4)
    x.add_(1)
    x[1:3].mul_(2)
    x.t()[0].zero_()
    torch.add(x, 1, out=x)
    torch.add(z, x, alpha=2, out=z)
    x.copy_(z)
    x.add_(x)
    x.addcmul_(z, x, value=0.5)
    torch._foreach_add_([x, z], 1.5)
    torch._foreach_addcdiv_([x], [z], [x + 5], 0.1)
    x[0].copy_(x[1])
    z.index_add_(0, torch.tensor([1, 0]).to(device), x[:2])
    return x, z, x[2], x.clone()


def views(device: torch.device) -> Any:
    x = data(device, 4, 6)
    a, b = x.split(3, dim=1)
    c = a.t()[1:].unsqueeze(0)
    y = torch.cat([a, b.flip(0)]).view(2, 4, 3).transpose(0, 1)
    return a, b, c, c + 1, x.view(-1)[3:7], x.chunk(3, 1)[2].T, y, y.reshape(-1, 3) @ a.t()


def results(device: torch.device) -> Any:
    """Several results, undefined ones, lists, missing operands."""
    x = data(device, 2, 3, 4, 4).requires_grad_()
    weight = torch.ones(5, 3, 2, 2).to(device)
    y = F.conv2d(x, weight, torch.zeros(5).to(device))
    y.sum().backward()
    values, indices = x.detach().max(1)
    z = F.batch_norm(x, None, None, None, None, training=True)
    rows = x[torch.tensor([1, 0]).to(device)]
    return y, x.grad, values, indices, z, rows, x[:, torch.tensor([2]).to(device)], x.topk(2)[0]


def draws(device: torch.device) -> Any:
    torch.manual_seed(3)
    x = data(device, 3, 3)
    y = F.dropout(x, 0.5)
    return y, torch.rand_like(x), x.clone().normal_(), F.dropout(y, 0.5), (x / 9).bernoulli()


def training(device: torch.device) -> Any:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)  # the layers were made on the CPU
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(data(device, 2, 3, 8) / 48).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(model.parameters())


PROGRAMS: list[Program] = [numbers, writes, views, results, draws, training]


def forget() -> None:
    ltc.mark_step()
    ltc.wait_device_ops()
    context(0).trace.forget()
    context(0).compiler.forget()


def recorded(program: Program, shift: int) -> tuple[list[Any], Any]:
    """What stands in the steps of a program, after `shift` other values; and its results."""
    forget()
    device = ltc.lazy_device()
    with torch.random.fork_rng():
        x = data(device, 2, 2)
        for _ in range(shift):
            x = x.exp()
        found = program(device)
    trace = context(0).trace
    path = trace.path(trace.cursor)
    rows = [
        (
            step.parent.next_key,
            step.inputs,
            step.end,
            step.num_scalars,
            step.lenses or (),
            *of(step),
        )
        for step in path
    ]
    assert all(step.parent.next is step for step in path)
    del x
    return rows, found


def of(step: Any) -> tuple[Any, ...]:
    """What stands in its node. Numbers are compared with their kind: a `Ref` is equal to an int."""
    node = step.node
    kinds = [
        type(i) for i in leaves(node.args, *node.kwargs.values()) if isinstance(i, Ref | Scalar)
    ]
    writes = [i for i in leaves(node.args, *node.kwargs.values()) if type(i) is Write]
    return (
        node.op, node.args, node.kwargs, kinds, writes, node.first, node.outs, node.writes, node.view, node.result,
        node.line, node.uses_default_dtype, node.module, references(node),
    )  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_copy_is_what_python_makes(program: Program) -> None:
    copies = native().copy_steps(False)
    try:
        recorded(program, 0)  # C++ sees the calls of an op after the first one
        wanted, _ = recorded(program, 3)
        native().copy_steps(True)
        before = fast_path.num_fast_calls()
        got, found = recorded(program, 3)
        num_copied = fast_path.num_fast_calls() - before
    finally:
        native().copy_steps(copies)
    names = [[str(row[5]) for row in rows] for rows in (got, wanted)]
    assert names[0] == names[1]
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours == theirs
    assert num_copied > 0.6 * len(got)  # not memory that is made, nor views that are made again
    assert_same(found, program(torch.device("cpu")), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_copied_is_followed(program: Program) -> None:
    for _ in range(3):
        recorded(program, 1)
    forget()
    for _ in range(3):  # the first one is copied
        program(ltc.lazy_device())
        ltc.mark_step()
    with calls_of_python() as names:
        found = program(ltc.lazy_device())

    assert not names
    assert_same(found, program(torch.device("cpu")), rtol=1e-4, atol=1e-5)


def test_other_metas_other_structure_and_other_types_are_no_copies() -> None:
    device = ltc.lazy_device()
    x, y = data(device, 2, 3), data(device, 3, 2)
    for k in range(3):
        for z in (x, y, x.double(), x.t()):
            z = z.exp() if k else z.neg()
            assert z.sum(0).shape == (z.shape[1],) and z.sum(1).shape == (z.shape[0],)
            assert (
                z.add(1).dtype == z.dtype
                and z.view(-1).shape == (6,)
                and z.view(6, 1).shape == (6, 1)
            )
            assert (z > 0).add(1).dtype == torch.int64 and (z > 0).add(1.5).dtype == torch.float32
        ltc.mark_step()


def test_who_shares_memory_with_what_is_written() -> None:
    """The metas are equal; whether an operand is the written one, a part of it, or another one, is not."""

    def program(device: torch.device) -> Any:
        found = []
        for k in range(4):
            for kind in range(4):
                x, y = data(device, 4, 2) + k, data(device, 4, 2) * k
                x.add_([x, y, x.detach(), x.view(4, 2)][kind])
                x[:2].mul_([x[2:], y[2:], x[:2], y[:2]][kind])
                found += [x, y]
        return found

    assert_same(program(ltc.lazy_device()), program(torch.device("cpu")))


def test_a_whole_cell_and_a_part_that_looks_like_it() -> None:
    """`clone` of a whole one records nothing, of a part an op."""
    x = data(ltc.lazy_device(), 4, 4)
    trace = context(0).trace
    for _ in range(3):
        part, whole = x[0:4].clone(), x.clone()
        names = [str(step.node.op) for step in trace.path(trace.cursor)]
        assert names.count("aten.clone.default") == 1
        assert part.tolist() == whole.tolist()
        forget()


def test_a_number_that_is_given_and_one_that_is_left_out() -> None:
    x = data(ltc.lazy_device(), 3)
    trace = context(0).trace
    for alpha in (2, 2, 1):
        y = x.add(x, alpha=alpha) + 1
    assert [sorted(step.node.kwargs) for step in trace.path(trace.cursor)][-2:] == [[], []]
    assert y.tolist() == [1.0, 3.0, 5.0]


def test_a_part_that_is_written_is_not_made_again() -> None:
    """Its cell and its lens are enough, also where its view steps are known to follow."""
    x = data(ltc.lazy_device(), 3, 2)
    part = x.t()
    ltc.mark_step()
    trace = context(0).trace
    for _ in range(3):
        x.t().add_(1)
        ltc.mark_step()
    part.add_(1)
    assert [step.node.op for step in trace.path(trace.cursor)] == [torch.ops.aten.add_.Tensor]
    assert x.tolist() == [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]


def test_the_default_dtype_decides() -> None:
    x = torch.arange(4).to(ltc.lazy_device())
    for k in range(3):
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                y = x * k
                assert (y / 2).dtype == dtype and (y + 0).sqrt().dtype == dtype
            finally:
                torch.set_default_dtype(torch.float32)


def test_while_modules_are_asked_for_python_records() -> None:
    x = data(ltc.lazy_device(), 3)
    found = []
    for is_on in (False, False, False, True, False):
        modules.is_on = is_on
        try:
            before = fast_path.num_fast_calls()
            x = x.sin()
            found.append(fast_path.num_fast_calls() - before)
        finally:
            modules.is_on = False
    assert found[2:] == [1, 0, 1]


def test_calls_that_python_records_again_are_kept_once() -> None:
    """Beside a known step Python records each call; one of them is enough to copy."""
    forget()
    schema = OpSchema.of(torch.ops.aten.exp.default)
    x = data(ltc.lazy_device(), 3)
    for n in range(3):  # the first calls of all ops here
        y = x.exp().sin() if n else x.exp()
    counts = []
    for k in range(8):
        y = x
        for i in range(3):
            y = y.sin() if k >> i & 1 else y.exp()  # each turn leaves the ways before it
        ltc.mark_step()
        counts.append(sys.getrefcount(schema))
    forget()
    assert sys.getrefcount(schema) < counts[0] + 4
    del y


def test_the_device_that_an_argument_names() -> None:
    """A copy to the operand's own device is a step; one to another device is none."""
    child.run(
        """
        import torch
        devices = [torch.device("ltc", k) for k in range(3)]
        for first in devices:
            for second in devices:
                x = torch.arange(6.0, device=first).view(2, 3)
                y = x.t()[1:].to(second, copy=True)
                z = torch.zeros_like(x, device=second)
                assert y.device == z.device == second
                assert y.tolist() == [[1.0, 4.0], [2.0, 5.0]] and z.tolist() == [[0.0] * 3] * 2
    """,
        LTC_NUM_DEVICES="3",
    )


def test_it_has_the_line_of_its_own_call() -> None:
    x = data(ltc.lazy_device(), 3)
    for _ in range(2):
        y = x.sin()
    z = x.sin()
    trace = context(0).trace
    lines = [step.node.line for step in trace.path(trace.cursor) if step.node is not None]
    assert lines[0] == lines[1] != lines[2] and source.__name__ not in lines[2]
    del y, z


def test_what_the_trie_forgets_is_freed() -> None:
    """The garbage collector does not look at copies."""
    schema = OpSchema.of(torch.ops.aten.exp.default)  # each key has it
    y = x = data(ltc.lazy_device(), 3)
    for _ in range(3):
        forget()
        for _ in range(100):
            y = y.exp()
        step = context(0).trace.cursor
        assert not gc.is_tracked(step) and not gc.is_tracked(step.node)
        held = sys.getrefcount(schema)
        del step
        y = x
        forget()
        assert sys.getrefcount(schema) < held - 90
