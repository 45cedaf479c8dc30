"""Which interface of a host a job listens on."""

from typing import Any

import psutil
import pytest
import torch

from ltc_dist.job import store
from ltc_dist.job.store import LOOPBACK, address_towards, gloo_devices, is_loopback, serve_store


def test_a_store_listens_on_one_address() -> None:
    served, port = serve_store()
    found = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert (LOOPBACK, port) in found and not [
        a for a in found if a.port == port and a.ip != LOOPBACK
    ]
    del served


def test_the_address_towards_another_host() -> None:
    assert address_towards("127.0.0.1") == LOOPBACK == address_towards("localhost")


def test_a_hosts_own_name_may_lead_to_its_loopback_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = {"me": "127.0.1.1", store._ANYWHERE: "10.1.2.3"}
    monkeypatch.setattr(store, "_source", routes.__getitem__)
    assert address_towards("me") == "10.1.2.3"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_names_of_the_loopback_interface(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "host-0", "192.0.2.1"])
def test_names_of_others(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("names", "is_one_host", "asked"),
    [
        (None, True, [{"hostname": LOOPBACK}]),
        ("lo", True, [{"hostname": LOOPBACK}]),
        ("eth0", True, [{"interface": "eth0"}]),
        ("eth0, eth1", False, [{"interface": "eth0"}, {"interface": "eth1"}]),
        (None, False, [{"hostname": LOOPBACK}]),
    ],
)
def test_what_gloo_is_asked_for(
    names: str | None, is_one_host: bool, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if names is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    created: list[Any] = []
    gloo: Any = torch.distributed.ProcessGroupGloo
    monkeypatch.setattr(gloo, "create_device", lambda **kinds: created.append(kinds))
    gloo_devices(is_one_host)
    assert created == asked
