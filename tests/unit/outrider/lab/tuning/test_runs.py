"""The order in which prompts are answered under several settings."""

import asyncio
from typing import Any, cast

import pytest

from outrider.client import Speculation
from outrider.lab.tuning import runs
from outrider.lab.tuning.runs import TimedOutput, Workload
from outrider.wire.processes.stop_flag import StopFlag
from tests.unit.outrider.lab.tuning.simulated_pair import answer


def test_every_prompt_is_answered_under_all_settings_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow for a while is slow for all; backwards for the next prompt, for the first of them,
    too. Before each answer comes one that is not counted, whose prompt is cached for no other.
    """
    asked: list[tuple[int, int, int]] = []
    num_led = 0

    async def answered(
        client: Any,
        load: Workload,
        index: int,
        repeat: int,
        wish: Speculation,
        max_tokens: int,
        cache: str | None = None,
    ) -> TimedOutput:
        nonlocal num_led
        k = cast(int, wish.num_draft_tokens)
        if cache is None:
            asked.append((repeat, index, k))
        else:
            assert max_tokens == max(2 * (k + 1), 16)
            num_led += 1
        assert num_led == len(asked) + (cache is not None)
        return answer(k, [True] * max_tokens)

    monkeypatch.setattr(runs, "_run_answer", answered)
    load = Workload(["a", "b"], 90, {"temperature": 0.0}, "model", 1.0, StopFlag())
    wishes = {str(k): Speculation(num_draft_tokens=k) for k in (1, 2, 12)}
    num_done: list[int] = []
    passes = asyncio.run(
        runs.run_interleaved(cast(Any, None), load, wishes, range(5, 7), lambda: num_done.append(len(asked)))
    )
    up, down = [1, 2, 12], [12, 2, 1]
    assert [k for _, _, k in asked] == [*up, *down, *down, *up]
    assert [(repeat, index) for repeat, index, _ in asked[::3]] == [(5, 0), (5, 1), (6, 0), (6, 1)]
    assert num_done == list(range(1, 13))
    assert {name: [len(own.answers) for own in each] for name, each in passes.items()} == {
        name: [2, 2] for name in wishes
    }
    assert all(one.num_tokens == 180 for each in passes.values() for one in each)
    salts = [load.options(0, 0, Speculation(), 1, cache)["cache_salt"] for cache in ("lead-in", "lead-in", None, None)]
    assert salts[0] == salts[1] and len(set(salts)) == 3
