"""The network between launcher and workers, cut while a gateway reaches them: who serves is not ended."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from deploy.fleet import Fleet
from deploy.sightings import Seen, Sightings
from outrider.client import AsyncClient
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.settings.pools import Pool, Role
from outrider.wire.settings.system import ScalingConfig
from tests.e2e.scripted_registry import ScriptedRegistry
from tests.e2e.streams import PROMPT
from tests.e2e.test_hung_engine import LocalWorker
from tests.stack import Process, Stack
from tests.tcp_relay import TcpRelay

FASTER = 5.0
"""What the launcher waits for is this much shorter, gRPC's own limits and the gateway's reports aside."""
HUNG_AFTER_S = 3.0


@pytest.fixture(autouse=True)
def soon_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.fleet.HUNG_AFTER_S", HUNG_AFTER_S)


@dataclasses.dataclass
class Launcher:
    """A fleet over the session's workers, which it sees through relays of its own."""

    workers: Mapping[str, LocalWorker]
    relays: Mapping[str, TcpRelay]
    """By the workers' own addresses."""
    eyes: Sightings
    registry: ScriptedRegistry

    def create(self, pool: Pool, member: str) -> LocalWorker:
        return self.workers[member]

    def adopt(self, pools: Iterable[Pool]) -> dict[str, tuple[Pool, LocalWorker]]:
        return {}

    def watch(self, member: str, role: Role, address: str) -> None:
        self.eyes.watch(member, role, self.relays[address].address)

    def forget(self, member: str) -> None:
        self.eyes.forget(member)

    def take(self) -> list[Seen]:
        own = {relay.address: address for address, relay in self.relays.items()}
        return [dataclasses.replace(seen, address=own[seen.address]) for seen in self.eyes.take()]

    def __post_init__(self) -> None:
        target = Pool("target", "target", TargetConfig(model="t"))
        draft = Pool("draft", "draft", DraftConfig(model="d"), serves=("target",))
        self.fleet = Fleet((target, draft), ScalingConfig(), self, self, lambda *told: None)
        self.fleet.start()

    async def until(self, holds: Callable[[], bool], limit_s: float) -> None:
        give_up = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < give_up
            self.fleet.tick(self.registry.reports[-1:])
            await asyncio.sleep(0.05)

    async def look(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        await self.until(lambda: time.monotonic() >= end_s, seconds + 1.0)

    def ended(self) -> dict[str, int]:
        return {name: worker.num_ended for name, worker in self.workers.items() if worker.num_ended}


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_worker_that_serves_is_ended_by_a_launcher_that_is_cut_off(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stack.draft is not None
    monkeypatch.setattr("deploy.sightings.PERIOD_S", 1.0 / FASTER)
    monkeypatch.setattr("deploy.sightings.TIMEOUT_S", 3.0 / FASTER)
    monkeypatch.setattr("deploy.fleet._LOST_AFTER_S", 5.0 / FASTER)
    workers = {
        "target-0": LocalWorker(stack.target.address, stack.target_info().epoch),
        "draft-0": LocalWorker(stack.draft.address, stack.draft_info().epoch),
    }
    async with (
        ScriptedRegistry() as registry,
        TcpRelay(stack.target.address) as to_target,
        TcpRelay(stack.draft.address) as to_draft,
    ):
        registry.publish(**{"target-0": (stack.target, "serving"), "draft-0": (stack.draft, "serving")})
        args = ["--registry", registry.address, "--port", "0", "--grpc-port", "0"]
        gateway = Process("gateway", args, wait=False, stderr_path=tmp_path / "gateway.log")
        relays = {stack.target.address: to_target, stack.draft.address: to_draft}
        eyes = Sightings(asyncio.get_running_loop(), None)
        launcher = Launcher(workers, relays, eyes, registry)
        try:
            address = str((await asyncio.to_thread(lambda: gateway.ready))["grpc"])
            await launcher.until(launcher.fleet.is_ready, 20.0)
            with to_target.being_cut():  # it sees the draft; the gateway hears both
                await launcher.until(lambda: launcher.fleet.late() == ["target-0"], 10.0)
                await launcher.look(HUNG_AFTER_S + 0.5)
                async with AsyncClient(address) as client:
                    answer = await client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
                assert answer.usage.num_accepted_tokens
                assert launcher.ended() == {}
                with to_draft.being_cut():  # nobody else says who lives, and it sees neither
                    await asyncio.to_thread(gateway.stop)
                    registry.reports.clear()
                    await launcher.until(lambda: len(launcher.fleet.late()) == 2, 10.0)
                    await launcher.look(HUNG_AFTER_S + 0.5)
                    assert launcher.ended() == {}
                await launcher.until(lambda: bool(launcher.ended()), 20.0)
                assert launcher.ended() == {"target-0": 1}, "now it is its silence alone"
        finally:
            for member in workers:
                eyes.forget(member)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(gateway.stop)
