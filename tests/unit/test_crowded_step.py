"""A step holds so many drafted tokens: one request's many answers make no step that others wait long for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.engine.sampling.chain import Chain
from target_service.waiting import Waiting, WaitingRoom


def test_drafts_that_a_step_has_no_room_for_go_plain_the_longest_first() -> None:
    room = WaitingRoom(*[None] * 4, lambda slot, count: Chain([2] * count, None), None)  # type: ignore[arg-type]
    job: Any = SimpleNamespace(num_draft_tokens=0)
    wanted = {(1, slot_id): 32 for slot_id in range(48)} | {(2, 0): 5, (2, 1): 0}
    room._waiting = {key: Waiting(job, None, None, count) for key, count in wanted.items()}  # type: ignore[arg-type]
    ready = room.take(wanted, 256)
    drafted = dict(zip(wanted, (len(one.draft_ids) for one in ready), strict=True))
    assert drafted[2, 0] == 5 and drafted[2, 1] == 0
    assert sorted(drafted[1, slot_id] for slot_id in range(48)) == [0] * 41 + [32] * 7
