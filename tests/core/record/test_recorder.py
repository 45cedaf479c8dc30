"""Recording: what makes a new step of the trace and what does not, and what an op that fails leaves behind."""

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core.errors import LtcError
from ltc_core.runtime.devices import context
from ltc_core.settings import settings
from tests.core.beside_eager import assert_same
from tests.core.counting import Counting
from tests.core.programs.new_steps import NoNewSteps


def num_inputs(*tensors: Tensor) -> int:
    """How many inputs the pending graph of these tensors has."""
    return ltc.dump_ir(tensors).count("= input")


def num_ops(*tensors: Tensor) -> int:
    text = ltc.dump_ir(tensors)
    return len(re.findall(r"= aten\.", text))


@pytest.fixture(scope="module", autouse=True)
def _random_state() -> None:
    """Made on first use and kept: no leak of the test that draws first."""
    ltc.get_rng_state()


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


@pytest.fixture
def x(device: torch.device) -> Iterator[Tensor]:
    yield torch.arange(1.0, 7.0).view(2, 3).to(device)
    ltc.mark_step()


# -- what comes again ------------------------------------------------------------------------------


def test_a_second_identical_loop_grows_no_new_step(x: Tensor) -> None:
    def step() -> Tensor:
        y = (x * 2).relu()
        y[0].add_(1)
        rows = y.split(1)
        total = torch.cat([rows[1], rows[0]]).sum()
        return total + torch.rand(3, device=x.device).sum() * 0

    step()
    ltc.mark_step()
    with NoNewSteps():
        for _ in range(3):
            step()
            ltc.mark_step()


def test_a_training_loop_settles_after_the_second_step(device: torch.device) -> None:
    """The first step makes gradients and optimizer state; from the second on all is known."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = [torch.randn(5, 4).to(device) for _ in range(6)]

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        net(batch).pow(2).mean().backward()
        optimizer.step()
        schedule.step()  # another learning rate each time
        ltc.mark_step()

    for batch in batches[:3]:
        step(batch)
    with NoNewSteps():
        for batch in batches[3:]:
            step(batch)


def test_different_tensors_of_one_shape_make_one_step(device: torch.device) -> None:
    def step(t: Tensor) -> Tensor:
        return t * t + 1

    kept = step(torch.ones(3).to(device))
    ltc.mark_step()
    with NoNewSteps():
        for k in range(3):
            kept = step(torch.full((3,), float(k)).to(device))
            ltc.mark_step()
            assert torch.equal(kept.cpu(), torch.full((3,), k * k + 1.0))
    assert step(torch.ones(4).to(device)).shape == (4,)


# -- inputs and outputs ----------------------------------------------------------------------------


def test_an_input_is_bound_once(x: Tensor) -> None:
    ltc.mark_step()
    y = x * 2
    z = x + y
    w = torch.addcmul(x, x, z)
    assert num_inputs(w) == 1


def test_aliases_and_views_are_one_input(x: Tensor) -> None:
    ltc.mark_step()
    y = x.detach() + x.data + x.t().t() + x.clone() + x.view(6).view(2, 3)
    assert num_inputs(y) == 1


def test_a_view_used_twice_is_recorded_once(x: Tensor) -> None:
    ltc.mark_step()
    row = x[0]
    ltc.mark_step()
    y = row + 1
    z = row * y
    assert ltc.dump_ir([z]).count("aten.select.int") == 1


def test_what_is_dead_is_not_run(x: Tensor) -> None:
    (x * 2).exp().sum()
    with Counting() as counted:
        ltc.mark_step()
    assert counted.syncs == {}  # nothing anybody can see
    y = x + 1
    (y * 2).exp()
    assert num_ops(y) == 1
    with Counting() as counted:
        ltc.mark_step()
    assert counted.ops == {"add": 1, "mul": 1, "exp": 1}  # recorded, though not run


def test_making_empty_memory_and_sharing_record_nothing(x: Tensor) -> None:
    ltc.mark_step(wait=True)
    t = torch.empty(3, device=x.device)
    torch.empty_like(x)
    x.new_empty(4)
    x.clone()
    x.detach()
    assert not context(0).trace
    t.zero_()
    assert context(0).trace


def test_known_program_is_counted(x: Tensor) -> None:
    """Ops as recorded; nothing on the CPU, one cut, one program."""
    ltc.mark_step(wait=True)
    with Counting() as counted:
        y = x.t() @ x
        y += 1
        y[0].mul_(2)
        kept = y.sum(1).relu()
        ltc.mark_step()
        assert torch.equal(kept.cpu(), kept.cpu())
    assert counted.ops == {"t": 1, "mm": 1, "add_": 1, "select": 1, "mul_": 1, "sum": 1, "relu": 1}
    assert counted.syncs == {"MarkStep": 1}
    assert counted.fallbacks == {}
    assert counted.compiles == 1


# -- writes ----------------------------------------------------------------------------------------


def test_lists_that_share_memory_are_written_in_order(x: Tensor) -> None:
    eager = x.cpu()
    y, wanted = x.clone(), eager.clone()
    torch._foreach_add_([y, y], [x, x * 2])
    torch._foreach_add_([wanted, wanted], [eager, eager * 2])
    assert_same(y, wanted)


def test_a_list_that_reads_what_it_wrote_before_is_recorded_item_by_item(x: Tensor) -> None:
    torch._foreach_mul_([x, x.clone()], [x * 2, x * 3])
    assert num_ops(x, torch.ones(2).to(x.device)) == 3  # each product is one, the list another
    ltc.mark_step()
    y = x + 0
    before = y._version
    torch._foreach_add_([x, y], [x, x])
    names = [
        line.split("aten.")[1].split(".")[0]
        for line in ltc.dump_ir([x, y]).splitlines()
        if "aten." in line
    ]
    assert names == ["add", "add_", "add_"]
    assert y._version == before + 1


def test_an_op_may_read_what_it_writes(x: Tensor) -> None:
    eager = x.cpu()
    for t in (x, eager):
        t.add_(t)
        t.mul_(t.detach())
        t[0].sub_(t[0])
    assert_same(x, eager)


def test_out_is_given_another_shape(x: Tensor) -> None:
    eager = x.cpu()
    answers = []
    for t in (x, eager):
        out = torch.empty(0, device=t.device)
        result = torch.mul(t, 2, out=out)
        assert result is out
        answers.append(out)
    assert_same(*answers)


def test_the_same_write_through_another_lens_is_another_step(x: Tensor) -> None:
    eager = x.cpu()
    for n in (0, 1, 0, 1):
        x[n].add_(1)
        eager[n].add_(1)
        ltc.mark_step()
    assert_same(x, eager)


# -- ops that fail where they are called -----------------------------------------------------------


def wrong_shapes(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(x, torch.ones(5, 2).to(x.device))


def wrong_device(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="Input tensor is not a lazy tensor: torch.FloatTensor"):
        x + torch.ones(2, 3)


def wrong_dtype(x: Tensor) -> None:
    with pytest.raises(RuntimeError):
        torch.mm(x, torch.ones(3, 2, dtype=torch.int64).to(x.device))


def wrong_dim(x: Tensor) -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(5)


def wrong_view(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="is invalid for input of size 6"):
        x.view(4, 2)


def wrong_write(x: Tensor) -> None:
    with pytest.raises(RuntimeError):
        x[0].add_(torch.ones(7).to(x.device))


def wrong_overlap(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="more than one element"):
        x[0, :1].expand(3).add_(1)


WRONG = [
    wrong_shapes, wrong_device, wrong_dtype, wrong_dim, wrong_view, wrong_write, wrong_overlap,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_loop_with_a_failing_op_in_between_corrupts_nothing(
    x: Tensor, wrong: Callable[[Tensor], None]
) -> None:
    """The clean loop is known before, after and in between, and all answers are right."""
    eager = x.cpu()

    def loop(t: Tensor, between: Callable[[Tensor], None] | None) -> Tensor:
        t.add_(1)
        if between is not None:
            between(t)
        y = t * 2
        t[0].sub_(y[1])
        ltc.mark_step()
        return y

    loop(x, None)
    loop(eager, None)
    for _ in range(2):
        assert_same(loop(x, wrong), loop(eager, None))
        with NoNewSteps():
            found = loop(x, None)
        assert_same(found, loop(eager, None))
        assert_same(x, eager)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_failing_op_first_in_a_step_leaves_numbering_intact(
    x: Tensor, wrong: Callable[[Tensor], None]
) -> None:
    ltc.mark_step(wait=True)
    wrong(x)
    ltc.mark_step(wait=True)
    y = x + x
    assert num_inputs(y) == 1
    assert_same(y, x.cpu() * 2)


def test_the_error_names_the_users_line_and_what_was_given(x: Tensor) -> None:
    with pytest.raises(LtcError) as error:
        torch.mm(x, x)
    assert "test_recorder.py" in error.value.where
    assert "float32[2, 3]" in error.value.got


def test_inputs_bound_for_an_op_that_failed_are_given_up(device: torch.device) -> None:
    """The op after it sees them as new, and a tensor that died in between is donated no more."""
    a, b = torch.ones(2, 3).to(device), torch.ones(4, 5).to(device)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            a @ b
    del b
    y = a.sum()
    assert num_inputs(y) == 1
    assert float(y) == 6


def test_nodes_know_the_users_line(x: Tensor) -> None:
    with settings.override(ir_debug=True):
        text = ltc.dump_ir([x.exp() + 1])
    lines = [line for line in text.split("\n") if "aten." in line]
    assert lines
    assert all("test_recorder.py:" in line for line in lines)
