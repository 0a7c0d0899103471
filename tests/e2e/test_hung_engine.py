"""An engine that hangs while its server goes on answering: no keepalive notices that."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.hanging_target import ARMED, HANG_ID
from tests.samples import total
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
