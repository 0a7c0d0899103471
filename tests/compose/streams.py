"""`python -m tests.compose.streams URL NUM TOKENS`: greedy streams of so many tokens, one after the other in NUM lines,
until stdin ends.

A process of its own, because published ports may be in another network namespace than the test's. Prints a JSON line
for each answer that ended; with `once` as a fourth argument each prompt is sent once.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field

import httpx

from benchmarks.common import dev_prompts

TIMEOUT_S = 330.0


@dataclass
class Answer:
    """What one request got."""

    prompt: int
    started: float
    """This and all times: seconds of the wall clock."""
    ended: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    times: list[float] = field(default_factory=list)
    """When each piece of text came."""
    error: str | None = None
    refused_with: int | None = None
    """HTTP status of a request that was not let in."""


async def ask(client: httpx.AsyncClient, prompt: int, text: str, num_tokens: int) -> Answer:
    answer = Answer(prompt, started=time.time())
    body = {"prompt": text, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["speculation"] = {"num_draft_tokens": 5}  # drafted for at any load: what is watched is whether the draft works
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.refused_with = response.status_code
                answer.error = f"{response.status_code}: {(await response.aread()).decode()[:300]}"
            async for line in response.aiter_lines():
                _take(answer, line.removeprefix("data: "))
    except httpx.HTTPError as error:
        answer.error = repr(error)
    answer.ended = time.time()
    if answer.error is None and answer.finish_reason != "length":
        answer.error = f"ended by {answer.finish_reason} after {len(answer.times)} pieces"
    return answer


def _take(answer: Answer, data: str) -> None:
    if not data.startswith("{"):
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = json.dumps(event["error"])
        return
    for choice in event["choices"]:
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if choice["text"]:
            answer.text += choice["text"]
            answer.times.append(round(time.time(), 3))


async def main(url: str, num_lines: int, num_tokens: int, once: bool) -> None:
    prompts = dev_prompts(num_lines)
    stop = asyncio.Event()
    if not once:
        asyncio.get_running_loop().run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: stop.set())

    async def line(number: int) -> None:
        while True:
            answer = await ask(client, number, prompts[number], num_tokens)
            print(json.dumps(asdict(answer)), flush=True)
            if once or stop.is_set():
                return
            if answer.error is not None:
                await asyncio.sleep(0.5)

    limits = httpx.Limits(max_connections=num_lines)
    client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)
    async with client, asyncio.TaskGroup() as group:
        for number in range(num_lines):
            group.create_task(line(number))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "once" in sys.argv[4:]))
