"""An engine that hangs while its server goes on answering: no keepalive notices that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import pytest

from deploy.actors import Started
from deploy.fleet import Fleet
from deploy.sightings import Sightings
from outrider.wire.settings.config import TargetConfig
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import ScalingConfig
from tests.e2e.faults.hanging_target import ARMED, HANG_ID
from tests.samples import total
from tests.service.control_client import ControlClient
from tests.stack import running_pools
from tests.tiny_models import tiny_llama

NOTICED_S = 6.0
PROMPT = [5, 6, 7, 8]


@pytest.mark.slow
async def test_requests_of_a_hung_engine_go_on_elsewhere_and_others_never_notice(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", 320)
    module = "tests.e2e.faults.hanging_target"
    with running_pools(2, 0, target=model, target_module=module, target_args=("--batch-invariant",)) as pools:
        url = pools.http()
        async with httpx.AsyncClient(timeout=60) as client:

            async def answer(prompt: list[int]) -> tuple[str, float]:
                """Its text and how long it took."""
                body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
                started_s = time.monotonic()
                response = await client.post(f"{url}/v1/completions", json=body)
                assert response.status_code == 200, response.text
                return response.json()["choices"][0]["text"], time.monotonic() - started_s

            for seed in range(8):  # both targets make steps, so that it is known how long theirs take
                await answer([seed, *PROMPT])
            (Path(model) / ARMED).touch()
            hanging = asyncio.create_task(answer([*PROMPT, HANG_ID]))
            await asyncio.sleep(1.6)
            others = [await answer([seed, *PROMPT]) for seed in range(20, 28)]
            assert max(took_s for _, took_s in others) < 1.5, "while it is being noticed"
            assert not hanging.done()
            text, took_s = await hanging
            assert took_s < NOTICED_S
            assert text == (await answer([*PROMPT, HANG_ID]))[0]
        samples = pools.metrics()
        assert total(samples, "outrider_retries_total", reason="lost") == 1
        assert total(samples, "outrider_breaker_open") == 1
        for target in pools.targets:
            target.kill()  # it would not end by itself


class LocalWorker:
    """A process that is there, where the launcher expects an actor."""

    def __init__(self, address: str, epoch: int) -> None:
        self._started = Started(address, 1, epoch, None, "here")
        self.is_asked = True
        self.num_ended = 0

    def ask(self) -> None:
        self.is_asked = True

    def answer(self) -> Started | None:
        answer, self.is_asked = self._started if self.is_asked else None, False
        return answer

    def num_restarts(self) -> int:
        return 0

    def restart(self) -> None:
        self.num_ended += 1


class OneWorker:
    """`ray_workers.RayWorkers` of one that is there."""

    def __init__(self, worker: LocalWorker) -> None:
        self._worker = worker

    def create(self, pool: Pool, member: str) -> LocalWorker:
        return self._worker

    def adopt(self, pools: Iterable[Pool]) -> dict[str, tuple[Pool, LocalWorker]]:
        return {}


@pytest.mark.slow
async def test_the_launcher_ends_a_worker_whose_engine_hangs_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.fleet.HUNG_AFTER_S", 6.0)
    model = tiny_llama(tmp_path / "model", 320)
    with running_pools(1, 0, target=model, target_module="tests.e2e.faults.hanging_target") as pools:
        address = pools.targets[0].address
        async with ControlClient(address, "target") as client:
            epoch = (await client.info()).epoch
        worker = LocalWorker(address, epoch)
        pool = Pool("chat", "target", TargetConfig(model=str(model)))
        eyes = Sightings(asyncio.get_running_loop(), None)
        fleet = Fleet([pool], ScalingConfig(), OneWorker(worker), eyes, lambda *told: None)
        fleet.start()

        async def until(holds: Callable[[], bool], limit_s: float) -> float:
            """How long it took."""
            started_s = time.monotonic()
            while not holds():
                assert time.monotonic() - started_s < limit_s
                fleet.tick([])
                await asyncio.sleep(0.1)
            return time.monotonic() - started_s

        def serves() -> bool:
            return not fleet.late()

        async def answer(client: httpx.AsyncClient, prompt: list[int]) -> None:
            body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            await client.post(f"{pools.http()}/v1/completions", json=body)

        await until(serves, 30.0)
        async with httpx.AsyncClient(timeout=60) as client:
            for seed in range(8):
                await answer(client, [seed, *PROMPT])
            idle_until_s = time.monotonic() + 12.0  # an engine that waits for work does not hang
            await until(lambda: time.monotonic() > idle_until_s or not serves(), 30.0)
            assert serves()
            (Path(model) / ARMED).touch()
            hanging = asyncio.create_task(answer(client, [*PROMPT, HANG_ID]))
            assert await until(lambda: not serves(), 60.0) > 4.0
            await until(lambda: worker.num_ended == 1, 60.0)
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
        eyes.forget("target-chat-0")
        await asyncio.sleep(0.1)
        pools.targets[0].kill()  # it would not end by itself
