"""What `outrider tune` measures and recommends, of pairs whose speed is known."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any, cast

import pytest

from outrider.client import Drafter, Speculation
from outrider.lab.tuning import study as study_module
from outrider.lab.tuning.runs import Pass, Workload
from outrider.lab.tuning.settings import chain_name
from outrider.lab.tuning.study import acceptance_probability
from outrider.lab.tuning.theory import improvement
from outrider.wire.errors import InvalidRequest
from outrider.wire.processes.stop_flag import StopFlag
from tests.unit.outrider.lab.tuning.known_study import EVERY_K
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, moods, one_pass


def test_acceptance_counts_what_the_target_compared() -> None:
    # 1 1 0 | 1 1 1 + | 0 | 1 and the end, behind which nothing counts
    found = acceptance_probability([one_pass(3, [[True, True, False, True, True, True, True, False, True]])])
    assert found == pytest.approx(6 / 8)
    assert acceptance_probability([one_pass(0, [[True] * 3])]) == 0.0


def test_a_study_of_a_pair_of_given_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured beside theory, and the best K's drafters; what the gateway refuses is left out."""
    asked: list[list[str]] = []
    draws = random.Random(11)
    texts = [moods(draws) for _ in range(30)]

    async def measured(
        client: Any, load: Workload, wishes: Mapping[str, Speculation], repeats: range, done: Any
    ) -> dict[str, list[Pass]]:
        asked.append(list(wishes))
        found = {}
        for name, wish in wishes.items():
            k = wish.num_draft_tokens if isinstance(wish.num_draft_tokens, int) and wish.enabled else 0
            found[name] = [one_pass(k, texts) for _ in repeats]
        return found

    async def led_in(client: Any, load: Workload, wish: Speculation) -> None:
        if wish.drafter == Drafter.LOOKUP:
            raise InvalidRequest("no lookup here")

    monkeypatch.setattr(study_module, "run_interleaved", measured)
    monkeypatch.setattr(study_module, "lead_in", led_in)
    load = Workload(["a"], MAX_TOKENS, {"temperature": 0.0}, "model", 1.0, StopFlag())
    offered = [Drafter.MODEL, Drafter.LOOKUP]
    found = asyncio.run(study_module.study_pair(cast(Any, None), load, offered, 12, 2, lambda text: None))
    assert [point.k for point in found.points] == list(EVERY_K) and found.points[0].speedup.median == 1.0
    assert found.points[4].paper_speedup == pytest.approx(improvement(found.alpha, 4, 0.1))
    best = max(found.points, key=lambda point: point.tokens_per_s).k
    assert asked[0] == [chain_name(k) for k in EVERY_K] and asked[1] == ["plain", "K = auto", chain_name(best)]
    assert found.refused == {f"K = {k}, lookup": "no lookup here" for k in {best, 8}}
    assert found.choice.name == chain_name(best)
