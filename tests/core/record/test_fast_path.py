"""What was recorded before is followed without Python, and is the same as what Python records.

Programs run several times on the CPU and on the device; once their steps are known, calls must be followed, the trie
must not grow, and every answer must be eager's.
"""

import contextlib
import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ltc_core as ltc
from ltc_core import build, errors
from ltc_core.record import fast_path, recorder, view_recorder
from ltc_core.runtime.device_context import DeviceContext
from ltc_core.runtime.devices import context
from tests.core import child
from tests.core.beside_eager import assert_same
from tests.core.models import CNN, MLP
from tests.core.programs.new_steps import NoNewSteps

aten = torch.ops.aten
Program = Callable[[torch.device], Any]
ROUNDS = 4

pytestmark = pytest.mark.skipif(
    fast_path.extension.load() is None, reason="there is no C++ compiler to build it with"
)


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    before = fast_path.enable(True)
    yield
    fast_path.enable(before)


def run(program: Program, device: torch.device) -> Any:
    torch.manual_seed(0)
    return program(device)


@contextlib.contextmanager
def calls_of_python() -> Iterator[list[str]]:
    """List the ops that Python records."""
    names: list[str] = []

    def noting(record: Any, schema_at: int) -> Any:
        def note(*args: Any) -> Any:
            names.append(args[schema_at].name)
            return record(*args)

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "_record_on", noting(recorder._record_on, 1))
        patch.setattr(view_recorder, "_record_view", noting(view_recorder._record_view, 0))
        yield names


def follows(program: Program) -> None:
    """Run a program until all its steps are known; then none needs Python, and all answers are eager's."""
    expected = run(program, torch.device("cpu"))
    for _ in range(ROUNDS - 1):
        assert_same(run(program, ltc.lazy_device()), expected)
        ltc.mark_step()
    before = fast_path.num_fast_calls()
    with NoNewSteps(), calls_of_python() as names:
        got = run(program, ltc.lazy_device())
    assert not names and fast_path.num_fast_calls() > before
    assert_same(got, expected)


def data(device: torch.device, *size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel())).view(size).to(device)


# -- kinds of ops ----------------------------------------------------------------------------------


def test_one_result_two_results_a_list_of_results() -> None:
    def program(device: torch.device) -> Any:
        x = data(device, 4, 6)
        values, places = x.max(1)
        return x + x, values, places, torch._foreach_exp([x, values]), x.unsafe_split(2)

    follows(program)


def test_equal_values_in_one_memory_and_in_two() -> None:
    """The values have the same numbers: what tells the calls apart is the memory that they share."""
    writes: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda x, y: torch._foreach_add_([x, y], 1.0),
        lambda x, y: torch._foreach_add_([x, y[0]], 1.0),
        lambda x, y: torch._foreach_mul_([x[0], y[0]], 2.0),
        lambda x, y: torch._foreach_add_([x[0], x[1]], [y[1], y[0]]),
        lambda x, y: torch._foreach_add_([x[0], x[1]], [x[1], y[0]]),
        lambda x, y: torch._foreach_addcmul_([x, y], [y, x], [y, y]),
        lambda x, y: x.add_(y),
        lambda x, y: x[0].copy_(y[1]),
        lambda x, y: x.normal_().add_(y),
    ]

    def program_of(order: tuple[int, ...], are_bound: bool) -> Program:
        def program(device: torch.device) -> Any:
            found = []
            for write in writes:
                for is_one in order:
                    x = data(device, 2, 3)
                    if are_bound and device.type != "cpu":
                        ltc.mark_step()
                    y = x if is_one else x.clone()
                    write(x, y)
                    found += [x.clone(), y.clone()]
            return found

        return program

    for order in (0, 1, 0), (1, 0, 1):
        for are_bound in True, False:
            program = program_of(order, are_bound)
            expected = run(program, torch.device("cpu"))
            for _ in range(ROUNDS):
                assert_same(run(program, ltc.lazy_device()), expected)
                ltc.mark_step()


def test_numbers_are_inputs_and_keep_their_type() -> None:
    def program(device: torch.device) -> Any:
        x = data(device, 3)
        out = [x + k for k in range(3)] + [x * 0.5, x.to(torch.int64) * True, x.add(x, alpha=3)]
        return [*out, x.clamp(1, None), x.pow(2.0), torch._foreach_mul([x, x], [2.0, 3.0])]

    follows(program)


def test_a_number_that_changes_is_followed() -> None:
    x = data(ltc.lazy_device(), 3)
    found = []
    for k in range(6):
        before = fast_path.num_fast_calls()
        y = x * (0.5 + k)
        found.append(fast_path.num_fast_calls() - before)
        assert y.tolist() == [0.0, 0.5 + k, 2 * (0.5 + k)]
    assert found[2:] == [1] * 4


ROWS: dict[str, Callable[[torch.Tensor], list[float]]] = {
    "a loop over rows": lambda x: [row.sum().item() for row in x],
    "an index": lambda x: [x[k].sum().item() for k in range(len(x))],
    "in another order": lambda x: [x[k * 7 % len(x)].sum().item() for k in range(len(x))],
    "parts that were made before": lambda x: [p.mul(2).sum().item() for p in x.chunk(10)],
    "parts of parts": lambda x: [p.t()[1].sum().item() for p in x.split(4)],
}


@pytest.mark.parametrize("kind", ROWS)
def test_many_ways_after_a_cut_are_followed(kind: str) -> None:
    """Each read cuts, and the next op is another one: that of another part."""
    on_cpu = torch.arange(120.0).view(30, 4)
    x = on_cpu.to("ltc:0")
    for _ in range(12):
        assert ROWS[kind](x) == ROWS[kind](on_cpu)
    with calls_of_python() as names:
        ROWS[kind](x)
    assert len(names) < 4  # an index that comes often may get a step of its own


def test_ways_that_are_taken_in_turn_are_followed() -> None:
    """After a cut, and within a graph."""

    def program(device: torch.device) -> Any:
        x, found = data(device, 2, 3), []
        for k in range(9):
            y = (x + 1, x * 2, x.exp())[k % 3]
            y = y.sum(0) if k % 2 else y.t()
            found.append(y.tolist())
        return found

    follows(program)


def test_of_many_ways_each_is_right() -> None:
    """More than C++ compares: Python finds the rest."""
    x = data(ltc.lazy_device(), 3)
    for _ in range(3):
        for k in range(40):
            assert (x.roll(k % 3) if k < 3 else x.view(3, *[1] * k)).flatten()[0].item() == (
                x.cpu().roll(k)[0].item() if k < 3 else 0.0
            )


def test_a_number_of_another_type_is_another_step() -> None:
    x = torch.arange(3).to(ltc.lazy_device())
    for _ in range(3):
        for factor, dtype in ((2, torch.int64), (2.0, torch.float32), (True, torch.int64)):
            y = x * factor
            assert y.dtype == dtype and y.tolist() == [0, 2 * int(factor) // 2, 2 * int(factor)]
            ltc.mark_step()


def test_an_argument_that_has_its_default_or_not() -> None:
    def program(device: torch.device) -> Any:
        x = data(device, 2, 3)
        return x.add(x, alpha=1), x.sum(0), x.sum(0, True), x.sum(0, dtype=torch.float64)

    follows(program)


def test_structure_that_changes_is_another_step() -> None:
    x = data(ltc.lazy_device(), 2, 3)
    for _ in range(3):
        for dims, keep in (([0], False), ([1], False), ([0], True), ([0, 1], False)):
            assert x.sum(dims, keep).shape == torch.empty(2, 3).sum(dims, keep).shape
            ltc.mark_step()


def test_writes_in_place_and_through_views() -> None:
    def program(device: torch.device) -> Any:
        x = data(device, 4, 4)
        x.add_(1)
        x[1:3].mul_(2)
        x.t()[0].zero_()
        torch.add(x, 1, out=x)
        torch._foreach_add_([x, x[0]], 1.5)
        y = x[2]
        x.mul_(3)
        x[0].copy_(x[1])
        return x, y, x.clone()

    follows(program)


def test_views_of_views_and_lists_of_views() -> None:
    def program(device: torch.device) -> Any:
        x = data(device, 4, 6)
        a, b = x.split(3, dim=1)
        c = a.t()[1:].unsqueeze(0)
        return a, b, c, c + 1, x.view(-1)[3:7], x.chunk(3, 1)[2].transpose(0, 1)

    follows(program)


def test_views_of_memory_that_was_written_since() -> None:
    """They are recorded again with the op that reads them: of a value, of an input, of one of several results."""
    ltc.mark_step()
    context(0).trace.forget()  # C++ follows up to 16 ways from one step
    context(0).compiler.forget()

    def program(device: torch.device) -> Any:
        x, z = data(device, 4, 6), data(device, 4, 6)
        a, b = x.t()[1:3], x.split(3, dim=1)[1].unsqueeze(0)
        c, whole = z.view(6, 4), x.detach()
        x.mul_(2)
        found = [a + b[0, 0, 0], b * 2]
        torch._foreach_add_([x, z], 1.5)
        found += [a.sin(), *torch._foreach_mul([a, c], 2.0), c.t() @ whole.t()[:, :4]]
        ltc.mark_step()
        x.add_(1)
        return [*found, a + 1, a.t() + b[0].sum(), b, c.t() - 1]

    follows(program)


def test_views_of_any_size_of_memory_that_was_written_since() -> None:
    def program(device: torch.device, n: int) -> Any:
        x, z = data(device, n, 6), data(device, n, 2, 3)
        a, b = x.t()[1:3, 1:], z.view(n, 6).narrow(0, 1, n - 2)
        x.mul_(2)
        z.add_(1)
        return a.sum(1), (a @ x[1:]).exp(), b * 2, a.t() + 1, b.t()

    for n in (5, 7, 9, 11, 13, 10, 12, 6, 10):
        with calls_of_python() as names:
            found = program(ltc.lazy_device(), n)
            ltc.mark_step()
        assert_same(found, program(torch.device("cpu"), n))
    assert not names


def test_undefined_results_and_missing_operands() -> None:
    def program(device: torch.device) -> Any:
        x = data(device, 2, 3, 4, 4).requires_grad_()
        weight = torch.ones(5, 3, 2, 2).to(device)  # no gradient is wanted for it, nor for the bias
        y = F.conv2d(x, weight, torch.zeros(5).to(device))
        y.sum().backward()
        z = F.batch_norm(x, None, None, None, None, training=True)
        return y, x.grad, z, x[torch.tensor([1, 0]).to(device)], x[:, torch.tensor([2]).to(device)]

    follows(program)


def test_draws_are_those_of_eager() -> None:
    def program(device: torch.device) -> Any:
        x = data(device, 3, 3)
        return F.dropout(x, 0.5), torch.rand_like(x), x.clone().normal_(), x.bernoulli(0.5).sum()

    follows(program)


def test_a_generator_of_the_users_own_is_left_to_python() -> None:
    device = ltc.lazy_device()
    for _ in range(3):
        generator = torch.Generator(device).manual_seed(3)
        wanted = torch.zeros(4).normal_(generator=torch.Generator().manual_seed(3))
        got = torch.zeros(4).to(device).normal_(generator=generator)
        assert_same(got, wanted)


@pytest.mark.parametrize(("make", "size"), [(CNN, (4, 1, 28, 28)), (MLP, (4, 32))])
@pytest.mark.usefixtures("exact_shapes")
def test_a_whole_training_step_needs_no_python(
    make: Callable[[], torch.nn.Module], size: tuple[int, ...]
) -> None:
    device = ltc.lazy_device()
    torch.manual_seed(0)
    module = make().to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    x, y = torch.randn(size).to(device), torch.tensor([0, 1, 2, 3]).to(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        ltc.mark_step()

    for _ in range(ROUNDS):
        step()
    with NoNewSteps(), calls_of_python() as names:
        step()
    assert not names


# -- what is not followed --------------------------------------------------------------------------


def test_the_default_dtype_decides_between_two_steps() -> None:
    x = torch.arange(4).to(ltc.lazy_device())
    for _ in range(3):
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                assert (x / 2).dtype == dtype
                assert x.sqrt().dtype == dtype
                ltc.mark_step()
            finally:
                torch.set_default_dtype(torch.float32)


def test_a_dispatch_mode_sees_every_call() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = data(ltc.lazy_device(), 3)
    for _ in range(3):
        (x + 1).tolist()
    with Watch():
        y = x + 1
    assert seen == ["aten.add.Tensor"] and y.tolist() == [1.0, 2.0, 3.0]


def test_inference_mode_makes_inference_tensors() -> None:
    x = data(ltc.lazy_device(), 2, 2)
    for _ in range(3):
        with torch.inference_mode():
            y, v, d = x + 1, x.t(), x.detach()
        assert y.is_inference() and not v.is_inference() and not d.is_inference()
        assert (x + 1).is_inference() is False
        ltc.mark_step()


def test_other_subclasses_are_none_of_its_business() -> None:
    seen: list[Any] = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return torch.ones(3)

    x = data(ltc.lazy_device(), 3)
    for _ in range(3):
        (x + x).tolist()
    logged = torch.Tensor._make_wrapper_subclass(Logged, (3,))
    assert (logged + logged).tolist() == [1.0, 1.0, 1.0] and seen == [aten.add.Tensor]


def test_tensors_of_two_devices_and_of_the_cpu_are_told_as_ever() -> None:
    device = ltc.lazy_device()
    x = data(device, 3)
    for _ in range(3):
        (x + x).tolist()
    with pytest.raises(errors.DeviceMismatchError, match="not a lazy tensor"):
        x + torch.ones(3)
    assert (x + torch.tensor(2.0)).tolist() == [2.0, 3.0, 4.0]  # a 0-dim tensor is a number


def test_an_operand_that_was_lost_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ltc.lazy_device()
    x, indices = data(device, 3), torch.tensor([7]).to(device)
    for _ in range(3):
        (x + 1).tolist()
    lost = x[indices]
    ltc.mark_step()
    with pytest.raises(errors.LtcError):
        lost.tolist()
    with pytest.raises(errors.LtcError):
        (lost + 1).tolist()
    ltc.wait_device_ops()


def test_switched_off_it_records_the_same_steps() -> None:
    def program(device: torch.device) -> Any:
        x = data(device, 4, 4)
        x[1].add_(2)
        return F.gelu(x @ x.t()), x.sum(0), torch._foreach_sub([x], 1)

    follows(program)
    fast_path.enable(False)
    before = fast_path.num_fast_calls()
    with NoNewSteps():
        got = run(program, ltc.lazy_device())
    assert fast_path.num_fast_calls() == before
    assert_same(got, run(program, torch.device("cpu")))


def test_a_new_path_after_a_followed_one() -> None:
    """A step that is not the expected one is recorded by Python from the middle of a followed path on."""
    device = ltc.lazy_device()
    for k in range(8):
        x = data(device, 3)
        y = (x + 1) * 2
        z = y.exp() if k % 3 == 2 else y.neg()
        wanted = (torch.arange(3.0) + 1) * 2
        torch.testing.assert_close(
            z.cpu(), wanted.exp() if k % 3 == 2 else wanted.neg(), rtol=1e-6, atol=0
        )


def test_threads_record_on_one_trace() -> None:
    device = ltc.lazy_device()
    answers: dict[int, list[float]] = {}

    def work(k: int) -> None:
        x = torch.full((2,), float(k)).to(device)
        for _ in range(200):
            x = x * 1.0 + 1
        answers[k] = x.tolist()

    for _ in range(2):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {k: [200.0 + k] * 2 for k in range(4)}


def test_a_call_that_is_not_recorded_is_not_taken_for_the_step_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = ltc.lazy_device()
    found = DeviceContext.value_data
    flipped: list[torch.Tensor] = []

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=lambda: flipped.append(y.flip(0)))
        thread.start()
        thread.join()
        return found(*args, **kwargs)

    x, y = torch.ones(4, device=device), torch.arange(4.0, device=device)
    for _ in range(ROUNDS):
        ltc.wait_device_ops()
        with monkeypatch.context() as patch:
            patch.setattr(DeviceContext, "value_data", meanwhile)
            copy = x.to("cpu", torch.float64)  # Python reads it
        assert copy.device.type == "cpu" and copy.tolist() == [1] * 4
        assert flipped.pop().tolist() == [3, 2, 1, 0]


def test_the_first_program_of_a_machine_runs_while_it_is_built(tmp_path: Path) -> None:
    """By a compiler that waits until the program has run, and copies a built file."""
    may_end, compiler = tmp_path / "may_end", tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/sh\nwhile [ ! -e {may_end} ]; do sleep 0.05; done\n"
        f'while [ "$1" != -o ]; do shift; done\ncp {fast_path.extension.library_path()} "$2"\n'
    )
    compiler.chmod(0o755)
    built = tmp_path / "extensions"
    built.mkdir(mode=0o700)
    for extension in build.EXTENSIONS:
        if extension is not fast_path.extension:
            shutil.copy(extension.library_path(), built)
    out, err = child.run(
        f"""
        import pathlib, time
        from ltc_core.record import fast_path
        x = torch.ones(3, device=device)
        assert (x * 2 + 1).sum().item() == 9 and not fast_path.extension.loaded
        pathlib.Path({str(may_end)!r}).touch()
        while not fast_path.num_fast_calls():
            assert (x * 2 + 1).sum().item() == 9
            time.sleep(0.05)
        """,
        LTC_CACHE_DIR=str(tmp_path),
        CXX=str(compiler),
    )
    assert err == "[ltc] building C++ parts, once for this user and this torch (some seconds)\n"
    assert fast_path.extension.library_path().name in [path.name for path in built.iterdir()]


def test_it_holds_nothing_that_the_user_let_go() -> None:
    device = ltc.lazy_device()
    for _ in range(4):
        x = data(device, 64)
        y = (x + 1).view(8, 8)
        y.add_(1)
        ltc.mark_step(wait=True)
    gone = [weakref.ref(t) for t in (x, y)] + [weakref.ref(t._h.value) for t in (x,)]
    used = context(0).memory.used_bytes
    del x, y
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert context(0).memory.used_bytes < used


# ---- factories -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_numbered", [True, False])
def test_factories_are_followed(is_numbered: bool) -> None:
    def program(device: torch.device) -> Any:
        place = torch.device(device.type, 0) if is_numbered else torch.device(device.type)
        x = torch.ones(3, 4, device=place, requires_grad=True)
        mask = torch.arange(4, device=place) < torch.full((3, 1), 2, device=place)
        bias = torch.zeros(3, 4, device=place).masked_fill(mask, -1.5)
        y = torch.where(mask, x * bias, torch.scalar_tensor(0.5, device=place)).clamp(-1, 1)
        y.sum().backward()
        steps = torch.linspace(0, 1, 5, device=place), torch.arange(1, 9, 3, device=place)
        return (
            y.detach(),
            x.grad,
            *steps,
            torch.eye(3, device=place),
            torch.tril_indices(3, 3, device=place),
        )

    follows(program)


def test_a_number_of_a_factory_may_change_and_a_size_is_another_step() -> None:
    place = torch.device(ltc.lazy_device().type, 0)
    for k in range(6):
        full, count = torch.full((2,), 0.5 * k, device=place), torch.arange(k, device=place)
        assert full.tolist() == [0.5 * k] * 2 and count.tolist() == list(range(k))
        assert torch.full((2,), k, device=place).dtype == torch.int64


def test_the_default_dtype_decides_what_a_factory_makes() -> None:
    place = torch.device(ltc.lazy_device().type, 0)

    def made() -> list[torch.dtype]:
        tensors = torch.zeros(2, device=place), torch.full((2,), 1.5, device=place)
        found = [t.dtype for t in (*tensors, torch.empty_strided((2,), (1,), device=place))]
        [t.sum().item() for t in tensors]
        return found

    for _ in range(4):
        assert made() == [torch.float32] * 3
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(4):
            assert made() == [torch.float64] * 3
    finally:
        torch.set_default_dtype(torch.float32)
    assert made() == [torch.float32] * 3


def test_a_factory_makes_its_tensor_on_the_device_it_is_given() -> None:
    child.run(
        """
        import torch, ltc_core as ltc
        name = ltc.lazy_device().type
        for _ in range(4):
            first, second = (torch.zeros(2, device=torch.device(name, k)) for k in (0, 1))
            named = torch.zeros(2, device=name)
            assert [t.device.index for t in (first, second, named)] == [0, 1, 0]
            assert second.add(1).tolist() == [1, 1] and first.add(2).tolist() == [2, 2]
            assert torch.empty_strided((2,), (1,), device=second.device).device == second.device
            with second.device:
                assert torch.ones(2).add(1).tolist() == [2, 2]
            torch.accelerator.set_device_index(1)
            named = torch.zeros(2, device=name), torch.empty_strided((2,), (1,), device=name)
            assert [t.device.index for t in named] == [1, 1]
            torch.accelerator.set_device_index(0)
        """,
        LTC_NUM_DEVICES="2",
    )


def test_modes_see_factories_and_inference_mode_makes_inference_tensors() -> None:
    place = torch.device(ltc.lazy_device().type, 0)

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    for _ in range(4):
        torch.zeros(2, device=place).sum().item()
        with Names():
            assert torch.zeros(2, device=place).device == place
        with torch.inference_mode():
            inferred = torch.zeros(2, device=place), torch.empty_strided((2,), (1,), device=place)
        assert all(t.is_inference() for t in inferred)
        assert not torch.zeros(2, device=place).is_inference()
    assert seen.count("aten::zeros") == 4


def test_memory_that_nobody_has_written_needs_no_python() -> None:
    x = torch.ones(4, 6, device=ltc.lazy_device())
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "empty_like": torch.empty_like,
        "new_empty": lambda t: t.new_empty(3, 2),
        "other dtype": lambda t: t.new_empty((3, 2), dtype=torch.int64),
        "strided": lambda t: t.new_empty_strided((2, 3), (1, 2)),
        "of no operand": lambda t: torch.empty_strided((2, 3), (1, 2), device=t.device),
        "transposed": lambda t: torch.empty_like(t.t()),
    }
    for name, call in calls.items():
        expected = call(torch.ones(4, 6))
        for _ in range(3):
            made = call(x)
            assert made.shape == expected.shape and made.dtype == expected.dtype, name
            assert made._h.meta.stride == expected.stride(), name  # type: ignore[attr-defined]
            assert made.fill_(2).sum().item() == 2 * made.numel(), name
    assert x.new_empty(2, device="cpu").device.type == "cpu"


def test_functions_of_subclasses_and_modes_are_asked() -> None:
    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func.__name__, [kind.__name__ for kind in types]

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func.__name__

    x = torch.ones(2, device=ltc.lazy_device())
    assert not torch.overrides.has_torch_function((x,))
    assert torch.add(x, torch.ones(2).as_subclass(Other)) == ("add", ["Other"])
    with Names():
        assert torch.add(x, x) == "add"
    assert getattr(x, "nothing_of_this_name", None) is None
    assert (x + x).tolist() == [2.0, 2.0]
