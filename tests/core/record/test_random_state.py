"""Random streams: a state is a value of the graph; one stream a device and one a generator.

That draws are eager's is in test_random_numbers.py; two devices are in test_devices_many.py.
"""

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ltc_core as ltc
from ltc_core.errors import DeviceError
from ltc_core.record import random_state
from ltc_core.record.random_state import Stream, state_meta
from ltc_core.runtime import devices
from ltc_core.settings import settings
from tests.core.beside_eager import assert_same
from tests.core.counting import Counting

aten = torch.ops.aten


@pytest.fixture
def device() -> torch.device:
    ltc.mark_step()
    return ltc.lazy_device()


def streams() -> random_state.Streams:
    assert random_state.streams is not None
    return random_state.streams


def new_stream() -> Stream:
    return Stream(0, lambda index: devices.context(index).trace)


class TestState:
    def test_it_has_the_format_of_pytorchs_cpu_generator(self, device: torch.device) -> None:
        ltc.manual_seed(42)
        state = ltc.get_rng_state()
        assert ltc.is_lazy_tensor(state) and state_meta().dtype is state.dtype is torch.uint8
        assert_same(state, torch.Generator().manual_seed(42).get_state())
        torch.rand(3, device=device)
        eager = torch.Generator().manual_seed(42)
        torch.rand(3, generator=eager)
        assert_same(ltc.get_rng_state(), eager.get_state())

    def test_a_state_can_be_kept_over_cuts_and_written(self, device: torch.device) -> None:
        ltc.manual_seed(1)
        kept = ltc.get_rng_state()
        copy = kept.clone()
        first = torch.rand(3, device=device)
        ltc.mark_step(wait=True)
        ltc.set_rng_state(kept)
        assert torch.rand(3, device=device).equal(first)
        kept.zero_()  # the user's tensor, not the stream
        torch.rand(1, device=device).item()
        ltc.set_rng_state(copy)
        assert torch.rand(3, device=device).equal(first)

    def test_setting_a_state_shares_nothing_with_it(self, device: torch.device) -> None:
        ltc.manual_seed(1)
        for state in (ltc.get_rng_state(), ltc.get_rng_state().cpu()):
            ltc.set_rng_state(state)
            before = state.clone()
            first = torch.rand(3, device=device)
            ltc.mark_step()
            assert state.equal(before)
            state.fill_(7)
            ltc.set_rng_state(before)
            assert torch.rand(3, device=device).equal(first)
            ltc.set_rng_state(before)

    def test_a_part_of_a_tensor_may_be_the_state(self, device: torch.device) -> None:
        """As it comes out of a checkpoint that keeps the states of all devices in one tensor."""
        ltc.manual_seed(1)
        both = torch.stack([ltc.get_rng_state(), ltc.get_rng_state()])
        first = torch.rand(3, device=device)
        ltc.set_rng_state(both[1])
        assert torch.rand(3, device=device).equal(first)

    def test_what_is_no_state_is_refused_and_changes_nothing(self, device: torch.device) -> None:
        ltc.manual_seed(1)
        before = ltc.get_rng_state().cpu()
        wrong = [
            torch.zeros(16, dtype=torch.uint8),
            torch.zeros(state_meta().size),
            torch.zeros(state_meta().size, dtype=torch.uint8),
        ]
        for state in (*wrong, *(w.to(device) for w in wrong[:2])):
            with pytest.raises(DeviceError, match="state") as raised:
                ltc.set_rng_state(state)
            assert "  Next: " in str(raised.value)
        assert ltc.get_rng_state().cpu().equal(before)


class TestStream:
    def test_without_a_seed_it_takes_pytorchs(self) -> None:
        torch.manual_seed(77)
        stream = new_stream()
        assert stream.initial_seed() == 77
        assert new_stream().get_state().cpu().equal(torch.Generator().manual_seed(77).get_state())

    def test_copies(self, device: torch.device) -> None:
        one, other = new_stream(), new_stream()
        one.manual_seed(5)
        other.copy_from(one)
        assert other.initial_seed() == 5
        assert other.get_state().equal(one.get_state())
        other.manual_seed(6)
        assert one.initial_seed() == 5 and not other.get_state().equal(one.get_state())

    def test_seeds_of_any_size(self, device: torch.device) -> None:
        for seed in (0, 2**31, 2**63, 2**64 - 1, -1):
            torch.manual_seed(seed)
            eager = torch.rand(2, generator=torch.Generator().manual_seed(seed))
            assert_same(torch.rand(2, device=device), eager)
            ltc.manual_seed(seed)
            assert_same(torch.rand(2, device=device), eager)
        for seed in (2**64, -(2**64)):
            with pytest.raises((RuntimeError, ValueError, OverflowError)):
                ltc.manual_seed(seed)

    def test_threads_share_the_default_one(self) -> None:
        found: list[Stream] = []
        threads = [
            threading.Thread(target=lambda: found.append(streams().default(0))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(s) for s in found}) == 1


class TestGenerators:
    def test_the_default_generator_is_the_default_stream(self, device: torch.device) -> None:
        module = getattr(torch, settings.device_name)
        default = module.default_generators[0]
        default.manual_seed(3)
        first = torch.rand(2, device=device)
        ltc.manual_seed(3)
        assert torch.rand(2, device=device, generator=default).equal(first)
        assert default.initial_seed() == module.initial_seed() == 3

    def test_one_that_is_dropped_leaves_nothing(self, device: torch.device) -> None:
        gc.collect()
        ltc.wait_device_ops()
        known, held = len(streams()._by_generator), ltc.get_memory_info()["bytes_used"]
        for seed in range(20):
            torch.rand(3, device=device, generator=torch.Generator(device).manual_seed(seed))
        gc.collect()
        ltc.wait_device_ops()
        assert len(streams()._by_generator) == known
        assert ltc.get_memory_info()["bytes_used"] == held

    def test_drawing_from_several_in_one_step(self, device: torch.device) -> None:
        one, other = torch.Generator(device).manual_seed(1), torch.Generator(device).manual_seed(2)
        eager = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        with Counting() as counted:
            drawn = [torch.rand(2, device=device, generator=g) for g in (one, other, one, other)]
            ltc.mark_step()
        assert counted.syncs == {"MarkStep": 1}
        expected = [torch.rand(2, generator=g) for g in (*eager, *eager)]
        assert_same(drawn, expected)

    @pytest.mark.parametrize(
        "op",
        [
            lambda x, g: torch.poisson(x, g),
            lambda x, g: torch.poisson(x, generator=g),
            lambda x, g: torch._standard_gamma(x, g),
            lambda x, g: torch.binomial(x, x / 9, g),
            lambda x, g: aten.rrelu_with_noise(-x, torch.zeros_like(x), 0.1, 0.3, True, g),
        ],
    )
    def test_a_generator_as_a_positional_argument(self, device: torch.device, op: Any) -> None:
        for _ in range(4):
            given = torch.Generator(device).manual_seed(3), torch.Generator().manual_seed(3)
            drawn, eager = (op(torch.full((4,), 3.0, device=g.device), g) for g in given)
            assert_same(drawn, eager)

    def test_the_wrong_device_is_named(self, device: torch.device) -> None:
        with pytest.raises(RuntimeError, match="Expected a .* device type for generator") as raised:
            torch.rand(2, device=device, generator=torch.Generator())
        assert "cpu" in str(raised.value) and settings.device_name in str(raised.value)


class TestGraphs:
    def test_the_state_is_no_reason_to_compile(self, device: torch.device) -> None:
        x = torch.ones(8, device=device)

        def step() -> None:
            F.dropout(x + torch.randn(8, device=device))
            ltc.mark_step()

        step()
        with Counting() as counted:
            for seed in range(5):
                torch.manual_seed(seed)
                step()
                with ltc.fork_rng():
                    step()
                ltc.set_rng_state(ltc.get_rng_state())
                step()
        # One program that may write over the old state, one for when somebody keeps it.
        assert counted.compiles <= 2 and set(counted.syncs) <= {"MarkStep"}

    def test_a_draw_nobody_looks_at_still_moves_the_state(self, device: torch.device) -> None:
        torch.manual_seed(0)
        torch.rand(3, device=device)
        ltc.mark_step()
        after = torch.rand(3, device=device)
        eager = torch.Generator().manual_seed(0)
        torch.rand(3, generator=eager)
        assert_same(after, torch.rand(3, generator=eager))

    def test_a_step_that_failed_leaves_a_state_to_go_on_from(self, device: torch.device) -> None:
        torch.manual_seed(0)
        drawn = torch.rand(3, device=device)
        lost = F.embedding(torch.tensor([9], device=device), torch.ones(2, 2, device=device))
        later = torch.rand(3, device=device)
        with pytest.raises(IndexError):
            ltc.mark_step(wait=True)
        del drawn, lost, later
        again = torch.rand(3, device=device)
        assert again.isfinite().all().item()
        ltc.manual_seed(0)
        assert_same(
            torch.rand(2, device=device), torch.rand(2, generator=torch.Generator().manual_seed(0))
        )
