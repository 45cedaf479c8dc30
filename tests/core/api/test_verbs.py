"""The verbs of a script, with the semantics of torch_xla's `xla_model`, torch._lazy and lazy_tensor_core.

Closures are in test_closures.py, several devices in test_devices_many.py, saving in test_plain.py.
"""

import gc
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core
import ltc_core.api.verbs as ltm
from ltc_core import metrics
from ltc_core.settings import settings
from tests.core.beside_eager import assert_same
from tests.core.counting import Counting
from tests.core.custom_ops import Gate, fail

NAME = settings.device_name


@pytest.fixture
def device() -> torch.device:
    ltm.mark_step()
    return ltm.lazy_device()


def test_every_verb_is_public_in_both_places() -> None:
    for name in ltm.__all__:
        assert getattr(ltc_core, name) is getattr(ltm, name), name
        assert getattr(ltm, name).__doc__, name
    assert set(ltm.__all__) <= set(ltc_core.__all__)


class TestDevices:
    def test_lazy_device(self) -> None:
        assert ltm.lazy_device() == ltm.lazy_device(0) == torch.device(NAME, 0)
        assert ltm.lazy_device(n=0, devkind="TPU") == torch.device(NAME, 0)
        assert isinstance(ltm.lazy_device(), torch.device)

    @pytest.mark.parametrize("n", [99, -1])
    def test_one_that_is_not_there(self, n: int) -> None:
        with pytest.raises(RuntimeError, match=f"there is no device {NAME}:{n}") as raised:
            ltm.lazy_device(n)
        text = str(raised.value)
        assert "test_verbs.py" in text and f"this process has 1: {NAME}:0" in text
        assert "  Next: set LTC_NUM_DEVICES" in text

    def test_supported_devices(self) -> None:
        assert ltm.get_lazy_supported_devices() == [f"{NAME}:0"]
        assert ltm.get_lazy_supported_devices(max_devices=8, devkind="CPU") == [f"{NAME}:0"]
        assert ltm.get_lazy_supported_devices(0) == []
        assert all(torch.device(d).type == NAME for d in ltm.get_lazy_supported_devices())

    def test_what_it_stands_for(self, device: torch.device) -> None:
        assert ltm.lazy_device_hw(device) == ltm.lazy_device_hw(f"{NAME}:0") == "CPU"

    def test_is_lazy_tensor(self, device: torch.device) -> None:
        t = torch.ones(2, device=device)
        for lazy in (t, t[0], nn.Parameter(t), t.detach(), t.to(torch.int64), torch.empty_like(t)):
            assert ltm.is_lazy_tensor(lazy)
        for other in (torch.ones(2), t.cpu(), t.to("meta"), 3, None, [t]):
            assert not ltm.is_lazy_tensor(other)

    def test_a_device_of_another_kind(self) -> None:
        for call in (
            lambda: ltm.wait_device_ops(["cpu"]),
            lambda: ltm.get_memory_info("cpu"),
            lambda: ltm.mark_step(device="cpu"),
            lambda: ltm.manual_seed(1, "cpu"),
            lambda: ltm.send_cpu_data_to_device(torch.ones(1), "cpu"),
        ):
            with pytest.raises(RuntimeError, match="cpu is not a lazy device") as raised:
                call()
            assert f"expected one of {NAME}:0" in str(raised.value)
            assert "test_verbs.py" in str(raised.value)


class TestMarkStep:
    def test_it_cuts_and_counts(self, device: torch.device) -> None:
        before = metrics.counter_value("MarkStep") or 0
        kept = torch.ones(2, device=device) + 1
        with Counting() as counted:
            assert ltm.mark_step() is None
            ltm.mark_step()
        assert counted.syncs == {"MarkStep": 1}
        assert metrics.counter_value("MarkStep") == before + 2
        assert kept.tolist() == [2.0, 2.0]

    def test_it_does_not_wait_unless_told_to(self, device: torch.device) -> None:
        with Gate() as gate:
            held = gate(torch.ones(2, device=device))
            ltm.mark_step()
            assert gate.reached.wait(10)
            gate.open()
            ltm.mark_step(wait=True)
            with Counting() as counted:
                assert held.tolist() == [1.0, 1.0]
            assert not counted.syncs

    def test_arguments_of_old_scripts(self, device: torch.device) -> None:
        ltm.mark_step(False, True)
        ltm.mark_step(wait=True, reset_scope=False)
        kept = [torch.ones(2, device=device) * i for i in range(3)]
        for i, where in enumerate((device, f"{NAME}:0", "")):
            with Counting() as counted:
                ltm.mark_step(device=where)
            assert counted.syncs == ({"MarkStep": 1} if i == 0 else {})
        del kept

    def test_sync_wait_makes_every_step_wait(self, device: torch.device) -> None:
        lost = fail(torch.ones(2, device=device))
        with settings.override(sync_wait=True), pytest.raises(ValueError, match="this op fails"):
            ltm.mark_step()
        del lost

    def test_step_is_a_step_with_both_ends(self, device: torch.device) -> None:
        before = torch.ones(2, device=device)
        with Counting() as counted, ltm.step():
            inside = before * 2
        after = inside + 1
        assert counted.syncs == {"MarkStep": 2}
        ltm.mark_step()
        with pytest.raises(KeyError), ltm.step():
            kept = after + 1
            raise KeyError("mine")
        with Counting() as counted:
            assert kept.tolist() == [4.0, 4.0]
        assert not counted.syncs


class TestWaiting:
    @pytest.mark.parametrize(
        "devices", [None, [], (), f"{NAME}:0", [f"{NAME}:0"], 0, {f"{NAME}:0"}]
    )
    def test_whatever_the_devices_are_given_as(self, devices: Any, device: torch.device) -> None:
        with Gate() as gate:
            held = gate(torch.ones(2, device=device))
            ltm.mark_step()
            assert gate.reached.wait(10)
            more = held + 1  # not cut yet
            gate.open()
            ltm.wait_device_ops(devices)
            with Counting() as counted:
                assert held.tolist() == [1.0, 1.0] and more.tolist() == [2.0, 2.0]
            assert not counted.syncs

    def test_a_torch_device_too(self, device: torch.device) -> None:
        ltm.wait_device_ops(device)
        ltm.wait_device_ops([device, NAME])

    @pytest.mark.parametrize("wait", [ltm.unlazy, ltm.sync_multi])
    def test_until_these_tensors_are_there(self, wait: Any, device: torch.device) -> None:
        x = torch.ones(2, 2, device=device)
        needed = [x * 2, nn.Parameter(x * 3), x[0] + 1, torch.ones(1), x.t()]
        with Counting() as counted:
            assert wait(needed) is None
            wait(needed)
            wait(needed[0])  # one tensor is a list of one, not of its rows
        assert counted.syncs == {"SyncMulti": 1}
        assert set(counted.ops) <= {"ones", "mul", "add", "select", "t", "transpose"}
        with Counting() as counted:
            assert needed[0].tolist() == [[2.0, 2.0], [2.0, 2.0]] and needed[2].tolist() == [
                2.0,
                2.0,
            ]
        assert not counted.syncs

    def test_sync_multi_takes_devices_and_need_not_wait(self, device: torch.device) -> None:
        with Gate() as gate:
            held = gate(torch.ones(2, device=device))
            ltm.sync_multi([held], [f"{NAME}:0"], wait=False)
            assert gate.reached.wait(10)
            gate.open()
        ltm.sync_multi([])
        assert held.tolist() == [1.0, 1.0]

    def test_what_failed_comes_out(self, device: torch.device) -> None:
        for wait in (lambda t: ltm.wait_device_ops(), ltm.unlazy, ltm.to_cpu):
            lost = fail(torch.ones(2, device=device))
            with pytest.raises(ValueError, match="this op fails"):
                wait([lost])
            ltm.wait_device_ops()


class TestMovingStructures:
    def test_to_cpu_keeps_the_structure_and_syncs_once(self, device: torch.device) -> None:
        Pair = namedtuple("Pair", ["a", "b"])
        x = torch.arange(4.0, device=device)
        tree = {
            "t": x * 2,
            "pair": Pair(x[1:], (x.view(2, 2).t(), "text")),
            "ordered": OrderedDict(z=nn.Parameter(x + 1), y=None),
            "list": [3, torch.ones(1), [x.to(torch.bool)]],
        }
        with Counting() as counted:
            moved = ltm.to_cpu(tree)
        assert sum(counted.syncs.values()) == 1
        assert isinstance(moved["pair"], Pair) and isinstance(moved["ordered"], OrderedDict)
        assert list(moved["ordered"]) == ["z", "y"] and moved["pair"].b[1] == "text"
        assert moved["list"][1] is tree["list"][1] and moved["list"][0] == 3
        expected = torch.arange(4.0)
        assert_same(tree["t"], expected * 2)
        assert moved["t"].device.type == "cpu" and moved["t"].equal(expected * 2)
        assert moved["pair"].a.equal(expected[1:])
        assert moved["pair"].b[0].equal(expected.view(2, 2).t())
        assert moved["ordered"]["z"].equal(expected + 1)
        assert moved["list"][2][0].tolist() == [False, True, True, True]

    def test_to_cpu_gives_copies(self, device: torch.device) -> None:
        x = torch.zeros(3, device=device)
        [moved] = ltm.to_cpu([x], [device])
        moved += 1
        assert x.tolist() == [0.0] * 3
        assert ltm.to_cpu(x).tolist() == [0.0] * 3 and ltm.to_cpu("text") == "text"

    def test_a_state_dict(self, device: torch.device) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4, 2, device=device)).sum().backward()
        optimizer.step()
        moved = ltm.to_cpu({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        again = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        again.load_state_dict(moved["model"])
        torch.optim.Adam(again.parameters()).load_state_dict(moved["optimizer"])
        assert_same(model[0].weight.detach(), again[0].weight.detach())

    def test_sending_one_tensor_gives_a_list_of_one(self, device: torch.device) -> None:
        host = torch.ones(2)
        sent = ltm.send_cpu_data_to_device(host, device)
        assert isinstance(sent, list) and len(sent) == 1 and sent[0].device == device
        host += 1
        assert sent[0].tolist() == [1.0, 1.0]

    def test_sending_structures(self, device: torch.device) -> None:
        there = torch.zeros(1, device=device)
        data = {"x": (torch.ones(2, 3).t(), 5), "y": [torch.tensor([True]), "text"], "z": there}
        sent = ltm.send_cpu_data_to_device(data, device, input_sharding=None)
        assert isinstance(sent["x"], tuple) and sent["x"][1] == 5 and sent["y"][1] == "text"
        assert sent["x"][0].device == sent["y"][0].device == device and sent["z"] is there
        assert_same(sent["x"][0], torch.ones(3, 2))
        assert sent["y"][0].dtype == torch.bool
        assert ltm.send_cpu_data_to_device([torch.ones(1)], f"{NAME}:0")[0].device == device

    def test_views_saved_apart_are_refused(self, device: torch.device) -> None:
        x = torch.ones(4, device=device)
        ltm.check_view_sharing([x, x, {"alias": x.detach()}, x + 1, torch.ones(1), "text"])
        ltm.check_view_sharing(nn.Linear(2, 2).to(device).state_dict())
        for structure in ([x, x[1:]], {"b": x.view(2, 2), "a": (1, [x])}, (x[:2], x[2:])):
            text = "Tensor ID 2 is sharing a view with tensor ID 1"
            with pytest.raises(RuntimeError, match=text) as raised:
                ltm.check_view_sharing(structure)
            assert "  Next: " in str(raised.value) and "test_verbs.py" in str(raised.value)


class TestRandomState:
    """The numbers themselves are in test_random_numbers.py and test_random_state.py."""

    def test_the_peers_verbs(self, device: torch.device) -> None:
        ltm.manual_seed(3)
        first = torch.rand(2, device=device)
        for seed in (lambda: ltm.set_rng_state(3), lambda: ltm.set_rng_state(3, device)):
            seed()
            assert torch.rand(2, device=device).equal(first)
        state = ltm.get_rng_state(device=NAME)
        second = torch.rand(2, device=device)
        with ltm.fork_rng(device=device):
            ltm.manual_seed(99, f"{NAME}:0")
            torch.rand(2, device=device)
        ltm.set_rng_state(state, device)
        assert torch.rand(2, device=device).equal(second)

    def test_forking_restores_after_an_exception(self, device: torch.device) -> None:
        ltm.manual_seed(3)
        first = torch.rand(2, device=device)
        ltm.manual_seed(3)
        with pytest.raises(KeyError), ltm.fork_rng():
            torch.rand(5, device=device)
            raise KeyError
        assert torch.rand(2, device=device).equal(first)


class TestMemoryInfo:
    def test_figures_under_both_generations_of_names(self, device: torch.device) -> None:
        ltm.wait_device_ops()
        gc.collect()  # what other tests left in cycles
        before = ltm.get_memory_info(device)
        kept = torch.ones(1000, device=device) + 1
        ltm.mark_step(wait=True)
        after = ltm.get_memory_info()
        assert after["bytes_used"] == before["bytes_used"] + 4000
        assert after["peak_bytes_used"] >= after["bytes_used"] and after["bytes_limit"] > 2**28
        assert 0 < after["kb_free"] < after["kb_total"] == after["bytes_limit"] // 1024
        del kept
        assert ltm.get_memory_info(0)["bytes_used"] == before["bytes_used"]


class TestDumpIr:
    def test_text(self, device: torch.device) -> None:
        weight = torch.ones(3).to(device)
        out = (weight * 2.5).exp_()
        dead = weight - 1
        with Counting() as counted:
            text = ltm.dump_ir([out])
        assert not counted.syncs
        lines = text.splitlines()
        assert len(lines) == 4 and lines[-1].startswith("return %")
        assert "float32[3]" in lines[0] and "input" in lines[0]
        assert "aten.mul" in lines[1] and "aten.exp_" in lines[2]
        assert "aten.sub" not in text and "aten.sub" in ltm.dump_ir([dead])
        assert ltm.dump_ir([out], "backend") == text

    def test_dot(self, device: torch.device) -> None:
        weight = torch.ones(3).to(device)
        first, second = torch.split(weight * 2, [1, 2])
        out = torch.cat([second, first])
        text = ltm.dump_ir([out], "dot")
        assert text.startswith("digraph G {") and text.rstrip().endswith("}")
        assert text.count("{") == text.count("}") == 1 and text.count('"') % 2 == 0
        edges = [line.strip() for line in text.splitlines() if "->" in line]
        names = {line.split(" [")[0].strip() for line in text.splitlines() if " [" in line}
        for edge in edges:
            begin, end = edge.rstrip(";").split(" -> ")
            assert begin in names and end in names, edge
        assert "aten.cat" in text and "aten.mul" in text and "input" in text

    @pytest.mark.usefixtures("exact_shapes")
    def test_user_lines_when_asked_for(self, device: torch.device) -> None:
        out = torch.ones(
            217, device=device
        ).exp()  # new: a node keeps the line that recorded it first
        assert "test_verbs.py" not in ltm.dump_ir([out])
        with settings.override(ir_debug=True):
            for fmt in ("text", "dot"):
                text = ltm.dump_ir([out], fmt)
                assert "test_verbs.py:" in text and "in test_user_lines_when_asked_for" in text

    def test_a_view_shows_what_it_sees_now(self, device: torch.device) -> None:
        x = torch.ones(3, device=device)
        part = x[1:]
        x.add_(41)
        assert "aten.add_" in ltm.dump_ir([part])

    def test_one_tensor_several_or_none_that_is_pending(self, device: torch.device) -> None:
        x = torch.ones(2, 2, device=device)
        y = x.exp()
        assert ltm.dump_ir(y) == ltm.dump_ir([y])  # not its rows
        assert ltm.dump_ir([x, y]).splitlines()[-1].count("%") == 2
        ltm.mark_step()
        assert "aten" not in ltm.dump_ir([y]) and "aten" not in ltm.dump_ir([torch.ones(1)])
        assert ltm.dump_ir([]).strip() == "return"

    def test_another_format(self, device: torch.device) -> None:
        with pytest.raises(RuntimeError, match="Unrecognized IR format: svg") as raised:
            ltm.dump_ir([torch.ones(1, device=device)], "svg")
        assert "text" in str(raised.value) and "dot" in str(raised.value)
