"""A draft that dies in the middle of a stream, and Ray that brings it back: no token changes, and drafts resume."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.client import AsyncClient, TokenKind
from tests.e2e.process_tree import Tree, tree
from tests.e2e.reference import assert_target_alone
from tests.e2e.test_draft_failure import PROMPT, Seen, greedy, plain, speculative
from tests.e2e.test_ray import get_info, launched, settings
from tests.stack import DEMO_TARGET, Process

MAX_TOKENS = 1980

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def processes() -> Iterator[Tree]:
    with tree() as made:
        yield made


@pytest.fixture(scope="module")
def pair(processes: Tree) -> Iterator[dict[str, Any]]:
    with launched(settings()) as command:
        yield command.ready()


@pytest.fixture(scope="module")
def gateway(pair: dict[str, Any]) -> Iterator[Process]:
    addresses = ["--target", pair["target"], "--draft", pair["draft"]]
    process = Process("gateway", [*addresses, "--port", "0", "--grpc-port", "0"])
    yield process
    process.stop()


async def test_drafts_resume_in_the_same_stream_once_ray_has_restarted_the_draft(
    pair: dict[str, Any], gateway: Process
) -> None:
    before, target = get_info("draft", pair["draft"]), get_info("target", pair["target"])
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(before.cpu_cores) & set(target.cpu_cores)
    seen = Seen()
    async with AsyncClient(str(gateway.ready["grpc"])) as client, greedy(client, MAX_TOKENS) as stream:
        await seen.read(stream, speculative(5))
        os.kill(before.pid, signal.SIGKILL)
        await seen.read(stream, plain(10))
        await seen.read(stream, speculative(5))
        after = await asyncio.to_thread(get_info, "draft", pair["draft"])
    assert seen.phases.endswith("sps"), seen.phases
    assert (after.epoch, after.pid) != (before.epoch, before.pid)
    assert list(after.cpu_cores) == list(before.cpu_cores)
    assert all(token.kind is TokenKind.PLAIN for r in seen.rounds if not r.num_drafted for token in r.tokens)
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (PROMPT, seen.ids))
