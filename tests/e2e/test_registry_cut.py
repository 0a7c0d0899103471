"""The network between gateway and registry, cut and healed, and a launcher that comes back as another one."""

import asyncio
from pathlib import Path

import pytest

from outrider.client import AsyncClient, Completion
from tests.e2e.scripted_registry import ScriptedRegistry
from tests.e2e.streams import PROMPT
from tests.stack import Process, Stack, read_metrics
from tests.tcp_relay import TcpRelay
from tests.waiting import until


def num_members(gateway: Process) -> dict[str, int]:
    """By role, those that it knows and is connected to."""
    samples = read_metrics(f"http://{gateway.ready['http']}/metrics")
    names = [name for name, value in samples.items() if name.startswith("outrider_worker_connected{") and value]
    return {role: sum(f'worker="{role}"' in name for name in names) for role in ("target", "draft")}


def is_joined(gateway: Process) -> bool:
    samples = read_metrics(f"http://{gateway.ready['http']}/metrics")
    (value,) = (value for name, value in samples.items() if name.startswith("outrider_registry_connected{"))
    return bool(value)


async def answer(client: AsyncClient) -> Completion:
    return await client.generate(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.mark.timeout(240)
async def test_members_stay_while_the_registry_is_cut_off_and_follow_it_when_it_is_back(
    stack: Stack, tmp_path: Path
) -> None:
    assert stack.draft is not None
    both = {"target_0": (stack.target, "serving"), "draft_0": (stack.draft, "serving")}
    async with ScriptedRegistry() as first, ScriptedRegistry(epoch=2) as second, TcpRelay(first.address) as relay:
        first.send_membership(**both)
        args = ["--registry", relay.address, "--port", "0", "--grpc-port", "0"]
        gateway = Process("gateway", args, wait=False, stderr_path=tmp_path / "gateway.log")
        try:
            address = str((await asyncio.to_thread(lambda: gateway.ready))["grpc"])
            async with AsyncClient(address) as client:
                before = await answer(client)
                assert before.usage.num_accepted_tokens
                with relay.being_cut():
                    first.send_membership(target_0=both["target_0"])  # nobody hears it
                    await until(lambda: not is_joined(gateway))
                    assert "its last membership stays in force" in gateway.log()
                    during = await answer(client)
                    assert during.usage.num_accepted_tokens
                await until(lambda: num_members(gateway) == {"target": 1, "draft": 0})
                assert await asyncio.to_thread(is_joined, gateway)
                first.send_membership(**both)
                await until(lambda: num_members(gateway) == {"target": 1, "draft": 1})
                # Another launcher, which has counted less far and has fewer members.
                second.send_membership(target_0=both["target_0"])
                relay.upstream = second.address
                relay.reset()
                await until(lambda: num_members(gateway) == {"target": 1, "draft": 0})
                after = await answer(client)
                assert not after.usage.num_draft_tokens
                texts = {one.choices[0].text for one in (before, during, after)}
                assert len(texts) == 1
        finally:
            await asyncio.to_thread(gateway.stop)
