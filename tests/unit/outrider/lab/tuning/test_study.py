"""A study of a pair whose speed is known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, cast

import pytest

from outrider.client import Drafter, Speculation
from outrider.lab.tuning import study as study_module
from outrider.lab.tuning.report import unsteady
from outrider.lab.tuning.runs import Pass, TimedAnswer, Workload
from outrider.wire.processes.processes import StopFlag
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, moods, one_pass


def test_a_study_of_a_pair_whose_speed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is half as fast when every K is measured as when costs were: that does not make `met` wrong. No seed
    of the one is one of the other's.
    """
    stages, seeds = iter((1.0, 2.0, 2.0)), list[range]()
    draws = random.Random(11)

    async def measured(
        client: Any, load: Workload, wishes: Mapping[str, Speculation], repeats: range, done: Any
    ) -> dict[str, list[Pass]]:
        seeds.append(repeats)
        slowness, found = next(stages), {}
        for name, wish in wishes.items():
            k = wish.num_draft_tokens if isinstance(wish.num_draft_tokens, int) and wish.enabled else 0
            found[name] = [slower(one_pass(k, [moods(draws) for _ in range(15)]), slowness) for _ in repeats]
        return found

    async def nothing(*args: Any) -> None: ...

    monkeypatch.setattr(study_module, "run_interleaved", measured)
    monkeypatch.setattr(study_module, "lead_in", nothing)
    load = Workload(["a"], MAX_TOKENS, {"temperature": 0.0}, "model", 1.0, StopFlag())
    found = asyncio.run(study_module.study(cast(Any, None), load, [Drafter.MODEL], 12, 2, lambda text: None))
    assert found.acceptance.shortest == 6 and len(found.acceptance.answers) == 7 * 2 * 15
    assert [point.k for point in found.points] == list(range(13))
    assert seeds == [range(2, 4), range(2), range(2)]
    assert all(point.met == pytest.approx(1.0, abs=0.1) for point in found.points)
    assert all(point.met_in_tokens_per_s == pytest.approx(0.5, abs=0.05) for point in found.points)
    assert found.points[6].tokens_per_s == pytest.approx(found.points[6].expected_tokens_per_s / 2, rel=0.1)
    assert "when costs were measured" in str(unsteady(found))


def slower(one: Pass, times: float) -> Pass:
    return Pass(tuple(TimedAnswer(each.rounds, tuple(times * gap_s for gap_s in each.gaps_s)) for each in one.answers))
