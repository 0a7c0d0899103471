"""Sixty-four clients at once, of every kind, some of which leave: each request ends, and nothing is left of any."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.client import AsyncClient, DraftLogprobs, OutriderError, Overloaded, RetryPolicy, Speculation
from tests.stack import Stack, running, wait_until_nothing_is_held
from tests.waiting import wait_until_none

NUM_CLIENTS = 64
MAX_GROWTH_MIB = 16.0
"""Of each process, over a load like one that it has had. The load before has used all of the KV cache, which takes
memory as it is used, so what still moves is how malloc's arenas fill. One [9, 4096] float32 left behind
a request would be 150 KB."""
MAX_LOADS = 3
"""Arenas fill once, sooner or later by chance; what a load leaves behind is left by each."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """48 places for 64 clients, some of which ask for two answers: there is a queue, and now and then a refusal."""
    limits, cache = (
        ("--max-running", "48", "--max-queue", "28", "--max-queue-wait-s", "600"),
        ("--kv-cache-tokens", "15360"),
    )
    folder = tmp_path_factory.mktemp("load")
    with running(target_args=cache, draft_args=cache, gateway_args=limits, log_folder=folder) as stack:
        yield stack


def options_of(rng: random.Random) -> dict[str, Any]:
    """One request's parameters. All of them are valid."""
    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.3, 0.8, 1.2]),
        "max_tokens": rng.randint(1, 40),
        "seed": rng.getrandbits(32),
    }
    maybe: dict[str, Any] = {
        "top_k": rng.randint(1, 200),
        "top_p": rng.uniform(0.5, 1.0),
        "min_p": rng.uniform(0.0, 0.1),
        "repetition_penalty": rng.uniform(1.0, 1.5),
        "presence_penalty": rng.uniform(-1.0, 1.0),
        "frequency_penalty": rng.uniform(-1.0, 1.0),
        "logit_bias": {rng.randrange(4096): rng.uniform(-5.0, 5.0) for _ in range(5)},
        "bad_words": ["self", "import"],
        "stop": [rng.choice(["\n\n", "def ", ")", "self"])],
        "ignore_eos": True,
        "n": 2,
    }
    options |= {name: value for name, value in maybe.items() if rng.random() < 0.2}
    return options


class Load:
    """Clients that come back until so many requests have ended. `ended` counts how."""

    def __init__(self, stack: Stack, prompts: list[str], seed: int) -> None:
        self.ended: Counter[str] = Counter()
        self._stack = stack
        self._prompts = prompts
        self._rng = random.Random(seed)

    async def run(self, num_requests: int) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            AsyncClient(self._stack.grpc, retries=RetryPolicy(0)) as sdk,
            httpx.AsyncClient(base_url=self._stack.http, timeout=100, limits=limits) as http,
        ):

            async def client() -> None:
                while self.ended.total() < num_requests:
                    call = self._rng.choice([self._over_grpc, self._over_grpc, self._over_http, self._streamed])
                    how = await asyncio.wait_for(call(sdk if call == self._over_grpc else http), 100)
                    self.ended[how] += 1
                    if how == "refused":
                        await asyncio.sleep(0.2)

            await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    def _request(self) -> tuple[str, dict[str, Any]]:
        prompt = self._rng.choice(self._prompts)
        return prompt[-self._rng.randint(20, 600) :], options_of(self._rng)

    async def _over_grpc(self, client: AsyncClient) -> str:
        prompt, options = self._request()
        options["speculation"] = Speculation(
            enabled=self._rng.random() < 0.9,
            num_draft_tokens=self._rng.randint(0, 8),
            draft_logprobs=self._rng.choice(list(DraftLogprobs)),
        )
        leave_after = self._rng.choice([None, None, None, 1, 3])
        finished, num_rounds = 0, 0
        try:
            async with client.stream(prompt, **options) as rounds:
                async for each in rounds:
                    finished += each.finish_reason is not None
                    num_rounds += 1
                    if num_rounds == leave_after:
                        return "left"
        except Overloaded:
            return "refused"
        except OutriderError as error:
            return f"{type(error).__name__}: {error.message}"
        return "whole" if finished == options.get("n", 1) else "cut short"

    async def _over_http(self, client: httpx.AsyncClient) -> str:
        """Whole answers, of which every fifth client loses patience before they come."""
        prompt, options = self._request()
        body = options | {"prompt": prompt, "speculation": {"num_draft_tokens": self._rng.randint(0, 8)}}
        patience_s = 0.3 if self._rng.random() < 0.2 else None
        try:
            async with asyncio.timeout(patience_s):
                reply = await client.post("/v1/completions", json=body)
        except TimeoutError:
            return "left"
        if reply.status_code != 200:
            return "refused" if reply.status_code == 429 else reply.text
        reasons = [choice["finish_reason"] for choice in reply.json()["choices"]]
        return "whole" if all(reasons) and len(reasons) == options.get("n", 1) else "cut short"

    async def _streamed(self, client: httpx.AsyncClient) -> str:
        prompt, options = self._request()
        body = options | {"messages": [{"role": "user", "content": prompt}], "stream": True, "logprobs": True}
        leave_after = self._rng.choice([None, None, 2])
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                return "refused" if reply.status_code == 429 else reply.text
            num_events, last = 0, ""
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    num_events, last = num_events + 1, line
                    if line.startswith('data: {"error"'):
                        return line
                    if num_events == leave_after:
                        return "left"
        return "whole" if last == "data: [DONE]" else "cut short"


def rss_mib(stack: Stack) -> dict[str, float]:
    """Resident memory of the three processes."""
    assert stack.draft is not None
    sizes = {}
    for name, process in (("target", stack.target), ("draft", stack.draft), ("gateway", stack.gateway)):
        status = Path(f"/proc/{process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        sizes[name] = int(line.split()[1]) / 1024
    return sizes


def num_files(stack: Stack) -> dict[str, int]:
    """Open files and sockets, of the gateway those of its own links only: its clients have all gone."""
    assert stack.draft is not None
    processes = (("target", stack.target), ("draft", stack.draft), ("gateway", stack.gateway))
    return {name: len(os.listdir(f"/proc/{process.pid}/fd")) for name, process in processes}


def wait_until_idle(stack: Stack) -> None:
    """No slot, block or ticket in the workers and no answer in the gateway, soon after the last client."""
    wait_until_nothing_is_held(stack)
    wait_until_none(lambda: stack.metrics()["outrider_running"] + stack.metrics()["outrider_queue_depth"])


@pytest.mark.parametrize(
    "num_requests", [pytest.param(100, id="short"), pytest.param(4800, id="long", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(400)
async def test_every_request_ends_and_leaves_nothing(
    loaded: Stack, dev_prompts: list[str], num_requests: int, capsys: pytest.CaptureFixture[str]
) -> None:
    await Load(loaded, dev_prompts, seed=1).run(num_requests // 2)
    wait_until_idle(loaded)
    files = num_files(loaded)

    for seed in range(2, 2 + MAX_LOADS):
        memory = rss_mib(loaded)
        load = Load(loaded, dev_prompts, seed)
        await load.run(num_requests)
        wait_until_idle(loaded)
        growth = {name: size - memory[name] for name, size in rss_mib(loaded).items()}
        with capsys.disabled():
            sizes = ", ".join(f"{name} {memory[name]:.0f} {growth[name]:+.1f} MiB" for name in memory)
            print(f"\n{dict(load.ended)}; {sizes}")
        assert set(load.ended) <= {"whole", "left", "refused"}, load.ended
        assert load.ended["whole"] >= num_requests // 3
        assert load.ended["left"] > 0
        if all(each < MAX_GROWTH_MIB for each in growth.values()):
            break
    else:
        pytest.fail(f"every load of {MAX_LOADS} left more than {MAX_GROWTH_MIB} MiB behind, the last one {growth}")
    assert {name: count for name, count in num_files(loaded).items() if count > files[name] + 2} == {}
    async with AsyncClient(loaded.grpc) as client:
        alone = await client.generate("def f():", max_tokens=4, temperature=0.0)
    assert alone.usage.num_completion_tokens == 4
