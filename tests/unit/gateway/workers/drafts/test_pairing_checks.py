"""A draft is paired with each target once for each life of the two, and a refusal is repeated when it is asked for."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from gateway.workers.drafts.pairing_checks import PairingChecks
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.membership import MemberSpec
from outrider.v1 import common_pb2 as pb
from tests.unit.gateway.scripted_pool import INFO, connection_of, link_of


class Pair:
    """A head and a target. `answers`: what the head says of it, one for each check."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.tasks: list[asyncio.Task[None]] = []
        self.num_changes = 0
        head = link_of(connection_of(), pb.WorkerInfo(needs_features=True))
        head.pair = self._pair
        self.draft = DraftMember(MemberSpec("d", "d", "draft", "d:1"), cast(Any, head))
        self.target = TargetMember(MemberSpec("t", "t", "target", "t:1", "t:2"), cast(Any, link_of(connection_of())))
        self.checks = PairingChecks(lambda: [(self.draft, self.target)], self._run, self._note)

    async def _pair(self, address: str, epoch: int) -> str | None:
        assert (address, epoch) == ("t:2", 7)
        await asyncio.sleep(0)
        return self.answers.pop(0)

    def _run(self, check: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(check))

    def _note(self) -> None:
        self.num_changes += 1

    async def check(self, **options: bool) -> None:
        self.checks.start(**options)
        self.checks.start(**options)  # which is running already
        await asyncio.gather(*self.tasks)


async def test_a_pair_that_fits_is_checked_once() -> None:
    pair = Pair(None)
    await pair.check()
    await pair.check(repeats_failed=True)
    assert (len(pair.tasks), pair.num_changes) == (1, 1)
    assert pair.draft.is_compatible(pair.target)


async def test_a_refusal_is_logged_once_and_may_be_repeated(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("other states", "other states", None)
    await pair.check()
    await pair.check()
    assert len(pair.tasks) == 1, "it is repeated only when that is asked for"
    await pair.check(repeats_failed=True)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [f"the draft at d:1 is not used: draft {INFO.model_id} does not fit target model: other states"]
    assert not pair.draft.is_compatible(pair.target)
    await pair.check(repeats_failed=True)
    assert pair.draft.is_compatible(pair.target) and len(pair.tasks) == 3


async def test_a_target_that_restarts_meanwhile_is_compared_again() -> None:
    pair = Pair("of the life before", None)
    pair.checks.start()
    await asyncio.sleep(0)
    link: Any = pair.target.link
    link.connection = connection_of()
    await pair.check()
    assert pair.answers == [] and pair.draft.is_compatible(pair.target)
