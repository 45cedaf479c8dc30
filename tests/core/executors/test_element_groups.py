"""Foreach ops that run together on a few tensors at a time: which ones may, and that their numbers are eager's."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltc_core as ltc
from ltc_core.executors.reference import element_groups, replay
from ltc_core.settings import settings
from tests.core.beside_eager import assert_same

CPU, LAZY = torch.device("cpu"), ltc.lazy_device()
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
}
Lists = list[list[Tensor]]


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[element_groups.ElementGroup]]:
    """The groups of the programs that are built meanwhile, in chunks of one or two small tensors."""
    groups: list[element_groups.ElementGroup] = []
    find = element_groups.find

    def noting(*args: Any) -> list[element_groups.ElementGroup]:
        groups.extend(find(*args))
        return find(*args)

    monkeypatch.setattr(element_groups, "find", noting)
    monkeypatch.setattr(element_groups, "CHUNK_BYTES", 64)
    if replay.extension.load() is None:
        pytest.skip("no C++ compiler")
    ltc.mark_step(wait=True)
    with settings.override(replay="always"):
        yield groups


def tensors(device: torch.device, lists: int = 3, length: int = 6) -> Lists:
    generator = torch.Generator().manual_seed(3)
    made = [
        [torch.rand(3 + k, 2, generator=generator) for k in range(length)] for _ in range(lists)
    ]
    return [[t.to(device) for t in each] for each in made]


def both(program: Callable[[Lists], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of all lists after the program, in eager and here, and what it returned."""
    results = []
    for device in (CPU, LAZY):
        lists = tensors(device)
        if device == LAZY:
            ltc.mark_step(wait=True)
        with torch.no_grad():
            more = program(lists)
        results.append([t.cpu() for each in [*lists, more or []] for t in each])
    return results[0], results[1]


class TestOptimizers:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_steps_are_eagers_to_the_last_bit(self, name: str, found: list[Any]) -> None:
        def train(device: torch.device) -> list[Tensor]:
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))).to(device)
            optimizer = getattr(torch.optim, name)(
                net.parameters(), lr=0.01, foreach=True, **OPTIMIZERS[name]
            )
            x = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).to(device)
            for _ in range(5):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                if device == LAZY:
                    ltc.mark_step()
            return [p.detach().cpu() for p in net.parameters()]

        expected, got = train(CPU), train(LAZY)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert found, "no group was found"


class TestWhatIsOneGroup:
    def test_a_row_of_ops_is_one(self, found: list[Any]) -> None:
        def program(lists: Lists) -> list[Tensor]:
            a, b, _ = lists
            torch._foreach_mul_(a, 0.5)
            torch._foreach_addcmul_(a, b, b, 0.1)
            made = torch._foreach_sqrt(a)
            torch._foreach_div_(made, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
            torch._foreach_add_(b, made)
            return made

        expected, got = both(program)
        assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))
        (group,) = found
        assert group.last - group.first == 5 and len(group.ends) > 2

    def test_what_is_made_for_the_next_op_dies_in_its_chunk(self, found: list[Any]) -> None:
        def program(lists: Lists) -> None:
            a, b, _ = lists
            torch._foreach_add_(a, torch._foreach_sqrt(torch._foreach_mul(b, b)))

        expected, got = both(program)
        assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))
        (group,) = found
        assert [k for k, _ in group.frees[1]] == list(range(6))

    def test_a_tensor_for_all_positions_from_outside(self, found: list[Any]) -> None:
        def program(lists: Lists) -> None:
            a, b, c = lists
            factor = c[0].sum() * 0.1
            torch._foreach_mul_(a, factor)
            torch._foreach_add_(a, b)

        assert_same(*both(program)[::-1])
        assert [g.last - g.first for g in found] == [2]

    def test_small_lists_are_none(self, found: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(element_groups, "CHUNK_BYTES", 1 << 19)

        def program(lists: Lists) -> None:
            torch._foreach_mul_(lists[0], 0.5)
            torch._foreach_add_(lists[0], lists[1])

        assert_same(*both(program)[::-1])
        assert not found


class TestWhatEndsAGroup:
    """Programs whose numbers depend on the order of the ops."""

    @staticmethod
    def _other_order(lists: Lists) -> None:
        a, b, _ = lists
        length = [t.reshape(-1)[:6].reshape(3, 2) for t in a]
        torch._foreach_add_(length, [t.reshape(-1)[:6].reshape(3, 2) for t in b])
        torch._foreach_mul_(length, length[::-1])

    @staticmethod
    def _one_for_all(lists: Lists) -> None:
        a, _, _ = lists
        ones = [t.sum() for t in a]
        torch._foreach_add_(ones, 1.0)
        torch._foreach_mul_(ones, ones[2])
        torch._foreach_add_(a, ones[0])

    @staticmethod
    def _twice_in_a_list(lists: Lists) -> None:
        a, b, _ = lists
        same = [b[0].sum()] * 6
        torch._foreach_mul_(a, 2.0)
        torch._foreach_add_([t.view(-1) for t in a], [s + 1 for s in same])
        torch._foreach_mul_([a[0], a[1], a[0], a[1], a[2], a[3]], 3.0)

    @staticmethod
    def _views_of_one(lists: Lists) -> None:
        a, _, _ = lists
        whole = torch.cat([t.view(-1) for t in a])
        parts = [whole[4 * k : 4 * k + 8] for k in range(6)]  # they overlap
        torch._foreach_add_(parts, 1.0)
        torch._foreach_mul_(parts, 2.0)
        a[0].copy_(whole[:6].view(3, 2))

    @staticmethod
    def _views_with_a_shift(lists: Lists) -> None:
        a, b, _ = lists
        torch._foreach_add_(a, b)
        heads = [t[:3] for t in a]
        torch._foreach_add_(heads, [*heads[1:], heads[0]])
        torch._foreach_mul_(a, 0.5)

    @staticmethod
    def _other_lengths(lists: Lists) -> None:
        a, b, _ = lists
        torch._foreach_add_(a, b)
        torch._foreach_mul_(a[:3], 2.0)
        torch._foreach_add_(a[3:], a[3:])

    @pytest.mark.parametrize(
        "name",
        [
            "_other_order",
            "_one_for_all",
            "_twice_in_a_list",
            "_views_of_one",
            "_views_with_a_shift",
            "_other_lengths",
        ],
    )
    def test_numbers_are_eagers(self, name: str) -> None:
        expected, got = both(getattr(self, name))
        assert_same(got, expected)


class TestFailures:
    def test_numbers_of_other_types(self, found: list[Any]) -> None:
        def program(lists: Lists, factor: complex) -> None:
            torch._foreach_mul_(lists[0], factor)
            torch._foreach_addcmul_(lists[0], lists[1], lists[2], 0.5)

        for factor in (0.5, 2, True):
            assert_same(*both(lambda lists, f=factor: program(lists, f))[::-1])
        assert found

    def test_each_tensor_has_one_of_its_versions_after_a_failure(self, found: list[Any]) -> None:
        x = [torch.full((4, 4), k + 2, device=LAZY) for k in range(6)]
        ltc.mark_step(wait=True)
        for powers in ([2] * 6, [1, 1, 1, -1, 1, 1]):
            before = [t.clone() for t in x]
            ltc.mark_step(wait=True)
            torch._foreach_add_(x, 1)
            torch._foreach_pow_(x, powers)
            torch._foreach_sub_(x, 1)
            if powers[3] > 0:
                assert [t[0, 0].item() for t in x] == [(k + 3) ** 2 - 1 for k in range(6)]
                continue
            with pytest.raises(RuntimeError, match="negative integer powers"):
                ltc.mark_step(wait=True)
            left = [t[0, 0].item() for t in x]
            old = [t[0, 0].item() for t in before]
            assert all(now in (was, was + 1) for now, was in zip(left, old, strict=True))
        assert found
