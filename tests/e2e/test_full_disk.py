"""A disk without room for another byte: what a part wants to write is lost, what it serves is not."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider.client import AsyncClient
from tests.e2e.streams import PROMPT
from tests.stack import DEMO_DRAFT, DEMO_TARGET, Pools, Process, stop_all

FULL = Path("/dev/full")
"""Takes every write as a full disk does: ENOSPC."""


class OnFullDisk(Process):
    """Its standard error is on a full disk; what it has said there cannot be read."""

    def log(self) -> str:
        return "its log is on a full disk"


def writes_to(pid: int, path: Path) -> bool:
    """With JSON its log is not on descriptor 2: that is where the log takes what others write."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(entry))
    return str(path) in found


@pytest.fixture
def pools() -> Iterator[Pools]:
    """All three parts, at the level at which they say most."""
    made = Pools([], [], [])
    loud = ["--log-level", "debug", "--log-format", "json"]
    try:
        made.targets.append(OnFullDisk("target_service", ["--model", DEMO_TARGET, *loud], stderr_path=FULL, wait=False))
        made.drafts.append(OnFullDisk("draft_service", ["--model", DEMO_DRAFT, *loud], stderr_path=FULL, wait=False))
        workers = ["--target", made.targets[0].address, "--draft", made.drafts[0].address]
        made.gateways.append(
            OnFullDisk("gateway", [*workers, "--port", "0", "--grpc-port", "0", *loud], stderr_path=FULL)
        )
        assert all(writes_to(part.pid, FULL) for part in made.processes)
        yield made
    finally:
        stop_all(made.processes)


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
async def test_serving_goes_on_when_no_part_can_write_its_log(pools: Pools) -> None:
    async with AsyncClient(pools.grpc()) as client, httpx.AsyncClient(base_url=pools.http(), timeout=60) as http:
        first = await client.generate(PROMPT, max_tokens=60, temperature=0.0, ignore_eos=True)
        refused = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": -1})
        assert refused.status_code == 400
        await asyncio.to_thread(pools.drafts[0].kill)  # there is much to say about that
        alone = await client.generate(PROMPT, max_tokens=60, temperature=0.0, ignore_eos=True)
    assert first.choices[0].text == alone.choices[0].text
    assert first.usage.num_accepted_tokens > 0 and alone.usage.num_rounds == 0
