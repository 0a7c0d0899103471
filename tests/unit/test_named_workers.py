"""Workers behind names: who they are follows the addresses, and what runs on one that has left them goes on."""

from __future__ import annotations

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry

from gateway.workers import named_workers
from gateway.workers.member_series import MemberSeries
from gateway.workers.membership import Membership, from_config
from gateway.workers.named_workers import NamedWorkers, resolve
from outrider.wire.settings.config import GatewayConfig


class Dns:
    """`addresses` of a name, or what asking for them raises. Keeps the memberships that came of it."""

    def __init__(self, target: str, draft: str | None = None) -> None:
        self.addresses: dict[str, list[str] | OSError] = {}
        self.connected: set[str] = set()
        self.told: list[Membership] = []
        listed = from_config(GatewayConfig(target=target, draft=draft))
        self.workers = NamedWorkers(listed, self.told.append, self.connected.__contains__, self._resolve)

    async def _resolve(self, host: str) -> list[str]:
        found = self.addresses[host]
        if isinstance(found, OSError):
            raise found
        return found

    def members(self) -> list[tuple[str, str, str]]:
        return [(one.name, one.address, one.deliver_address) for one in self.told[-1].members]


async def test_every_address_of_a_name_is_a_member_now_and_later() -> None:
    dns = Dns("chat=dns:///targets:7200", "small=dns:///drafts:7100;fixed=10.0.9.9:7100")
    dns.addresses = {"targets": ["10.0.0.1", "fd00::2"], "drafts": []}
    await dns.workers.look()
    fixed = ("draft-fixed-0", "10.0.9.9:7100", "")
    targets = [
        ("chat-10.0.0.1:7200", "10.0.0.1:7200", "10.0.0.1:7200"),
        ("chat-[fd00::2]:7200", "[fd00::2]:7200", "[fd00::2]:7200"),
    ]
    assert dns.members() == [*targets, ("small-drafts:7100", "", ""), fixed]
    assert [(pool.name, pool.role, pool.serves) for pool in dns.told[-1].pools] == [
        ("chat", "target", ()),
        ("small", "draft", ("chat",)),
        ("fixed", "draft", ("chat",)),
    ]
    await dns.workers.look()
    assert len(dns.told) == 1, "nothing has changed"
    dns.addresses["drafts"] = ["10.0.1.1"]
    await dns.workers.look()
    assert dns.members() == [*targets, ("small-10.0.1.1:7100", "10.0.1.1:7100", ""), fixed]


async def test_two_workers_of_a_host_are_two_members() -> None:
    dns = Dns("dns:///hosts:7200,dns:///hosts:7201")
    dns.addresses["hosts"] = []
    await dns.workers.look()
    assert [name for name, *_ in dns.members()] == ["target-hosts:7200", "target-hosts:7201"]
    dns.addresses["hosts"] = ["10.0.0.1"]
    await dns.workers.look()
    assert [name for name, *_ in dns.members()] == ["target-10.0.0.1:7200", "target-10.0.0.1:7201"]


@pytest.mark.parametrize("gone", [["10.0.0.2"], socket.gaierror(socket.EAI_NONAME, "Name or service not known")])
async def test_a_member_that_its_name_has_lost_goes_once_its_stream_ends(gone: list[str] | OSError) -> None:
    dns = Dns("dns:///targets:7200")
    dns.addresses["targets"] = ["10.0.0.1", "10.0.0.2"]
    await dns.workers.look()
    dns.connected.add("target-10.0.0.1:7200")
    dns.addresses["targets"] = gone
    await dns.workers.look()
    assert "target-10.0.0.1:7200" in {name for name, *_ in dns.members()}
    dns.connected.clear()
    await dns.workers.look()
    assert "target-10.0.0.1:7200" not in {name for name, *_ in dns.members()}


@pytest.mark.parametrize("code", [socket.EAI_NODATA, socket.EAI_AGAIN])
async def test_a_pool_whose_name_has_no_worker_is_missed(code: int) -> None:
    """By OutriderNoTarget and OutriderDraftsGone, which pass over a pool that is meant to have no members."""
    dns = Dns("chat=dns:///targets:7200")
    dns.addresses["targets"] = socket.gaierror(code, "no")
    await dns.workers.look()
    registry = CollectorRegistry()
    registry.register(MemberSeries(list, lambda: dns.told[-1]))
    for state, count in (("starting", 1), ("serving", 0)):
        labels = {"pool": "chat", "role": "target", "state": state}
        assert registry.get_sample_value("outrider_members", labels) == count


async def test_a_name_server_that_does_not_answer_says_nothing_of_the_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dns = Dns("dns:///targets:7200")
    dns.addresses["targets"] = ["10.0.0.1"]
    await dns.workers.look()
    dns.addresses["targets"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    await dns.workers.look()
    await dns.workers.look()
    assert dns.members() == [("target-10.0.0.1:7200", "10.0.0.1:7200", "10.0.0.1:7200")]
    assert [record.message for record in caplog.records] == [
        "targets cannot be looked up: [Errno -3] Temporary failure in name resolution; "
        "the workers that it had stay in force"
    ]


async def test_a_name_that_times_out_and_an_error_hold_up_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(named_workers, "LOOK_S", 0.005)
    dns = Dns("chat=dns:///targets:7200", "small=dns:///drafts:7100")
    dns.addresses = {"targets": ["10.0.0.1"], "drafts": ["10.0.1.1"]}
    failures, told = [RuntimeError("a bug"), RuntimeError("a bug")], asyncio.Event()

    async def slow(host: str) -> list[str]:
        if host == "drafts":
            await asyncio.Event().wait()
        return await dns._resolve(host)

    def heard(membership: Membership) -> None:
        if failures:
            raise failures.pop()
        dns.told.append(membership)
        told.set()

    await dns.workers.wait_first(1)
    dns.workers._resolve, dns.workers._on_membership = slow, heard
    dns.addresses["targets"] = ["10.0.0.2"]
    await asyncio.wait_for(told.wait(), 10)
    await dns.workers.close()
    assert [name for name, *_ in dns.members()] == ["chat-10.0.0.2:7200", "small-10.0.1.1:7100"]
    assert [record.message for record in caplog.records] == ["the workers of dns:///targets:7200 cannot be followed"]


async def test_a_worker_with_an_address_of_each_family_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_: object, **__: object) -> list[tuple[object, ...]]:
        found = ((socket.AF_INET6, "fd00::1"), (socket.AF_INET, "10.0.0.1"), (socket.AF_INET6, "fd00::2"))
        return [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for family, address in found]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert await resolve("targets") == ["fd00::1", "fd00::2"]


async def test_names_are_looked_up_by_the_system_and_lists_without_them_once() -> None:
    named, fixed = Dns("dns:///127.0.0.1:7200"), Dns("127.0.0.1:7200")
    named.workers = NamedWorkers(
        from_config(GatewayConfig(target="dns:///127.0.0.1:7200")), named.told.append, lambda name: False
    )
    for dns in (named, fixed):
        await dns.workers.wait_first(1)
        await dns.workers.close()
    assert named.members() == [("target-127.0.0.1:7200", "127.0.0.1:7200", "127.0.0.1:7200")]
    assert fixed.members() == [("target-0", "127.0.0.1:7200", "127.0.0.1:7200")]
