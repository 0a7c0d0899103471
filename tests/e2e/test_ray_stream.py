"""A draft that dies in the middle of a stream, and Ray that brings it back: no token changes, and drafts resume."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from outrider.client import AsyncClient, TokenKind
from tests.e2e.process_tree import Tree, tree
from tests.e2e.reference import assert_target_alone
from tests.e2e.relay import Relay
from tests.e2e.streams import PROMPT, Seen, greedy, plain, speculative
from tests.e2e.test_ray import get_info, launched, settings
from tests.stack import DEMO_TARGET, Process

MAX_TOKENS = 1900
PAUSE_S = 0.02
"""Ray takes a few seconds; without it a fast machine's stream may be over by then."""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def processes() -> Iterator[Tree]:
    with tree() as made:
        yield made


@pytest.fixture(scope="module")
def pair(processes: Tree) -> Iterator[dict[str, Any]]:
    with launched(settings()) as command:
        yield command.ready()


@contextlib.asynccontextmanager
async def paced_gateway(pair: dict[str, Any]) -> AsyncIterator[str]:
    """Address of a gateway whose messages take PAUSE_S to the target, so that a stream outlives Ray's restart."""
    async with Relay("target", pair["target"], hold=lambda item: PAUSE_S) as relay:
        workers = ["--target", relay.address, "--target-for-draft", pair["target"], "--draft", pair["draft"]]
        gateway = await asyncio.to_thread(Process, "gateway", [*workers, "--port", "0", "--grpc-port", "0"])
        try:
            yield str(gateway.ready["grpc"])
        finally:
            await asyncio.to_thread(gateway.stop)


async def test_drafts_resume_in_the_same_stream_once_ray_has_restarted_the_draft(pair: dict[str, Any]) -> None:
    before, target = get_info("draft", pair["draft"]), get_info("target", pair["target"])
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(before.cpu_cores) & set(target.cpu_cores)
    seen = Seen()
    async with paced_gateway(pair) as address, AsyncClient(address) as client:
        async with greedy(client, MAX_TOKENS) as stream:
            await seen.read(stream, speculative(5))
            os.kill(before.pid, signal.SIGKILL)
            await seen.read(stream, plain(10))
            await seen.read(stream, speculative(10))
        after = await asyncio.to_thread(get_info, "draft", pair["draft"])
    assert seen.phases.endswith("sps"), seen.phases
    assert len(seen.ids) < MAX_TOKENS  # drafts came back before the end
    assert after.epoch != before.epoch
    assert after.pid != before.pid
    assert list(after.cpu_cores) == list(before.cpu_cores)
    assert all(token.kind is TokenKind.PLAIN for r in seen.rounds if not r.num_drafted for token in r.tokens)
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (PROMPT, seen.ids))
