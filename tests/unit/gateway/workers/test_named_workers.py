"""Workers behind names: who they are follows the addresses, and what runs on one that has left them goes on."""

import socket

import pytest

from gateway.workers.membership import Membership, from_config
from gateway.workers.named_workers import NamedWorkers
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
    await dns.workers.look_up()
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
    await dns.workers.look_up()
    assert len(dns.told) == 1, "nothing has changed"
    dns.addresses["drafts"] = ["10.0.1.1"]
    await dns.workers.look_up()
    assert dns.members() == [*targets, ("small-10.0.1.1:7100", "10.0.1.1:7100", ""), fixed]


@pytest.mark.parametrize("gone", [["10.0.0.2"], socket.gaierror(socket.EAI_NONAME, "Name or service not known")])
async def test_a_member_that_its_name_has_lost_goes_once_its_stream_ends(gone: list[str] | OSError) -> None:
    dns = Dns("dns:///targets:7200")
    dns.addresses["targets"] = ["10.0.0.1", "10.0.0.2"]
    await dns.workers.look_up()
    dns.connected.add("target-10.0.0.1:7200")
    dns.addresses["targets"] = gone
    await dns.workers.look_up()
    assert "target-10.0.0.1:7200" in {name for name, *_ in dns.members()}
    dns.connected.clear()
    await dns.workers.look_up()
    assert "target-10.0.0.1:7200" not in {name for name, *_ in dns.members()}


async def test_a_name_server_that_does_not_answer_removes_no_workers(caplog: pytest.LogCaptureFixture) -> None:
    dns = Dns("dns:///targets:7200")
    dns.addresses["targets"] = ["10.0.0.1"]
    await dns.workers.look_up()
    dns.addresses["targets"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    await dns.workers.look_up()
    await dns.workers.look_up()
    assert dns.members() == [("target-10.0.0.1:7200", "10.0.0.1:7200", "10.0.0.1:7200")]
    assert [record.message for record in caplog.records] == [
        "targets cannot be looked up: [Errno -3] Temporary failure in name resolution; "
        "the workers that it had stay in force"
    ]
