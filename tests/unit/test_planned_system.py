"""K that adapts, in a simulated system: never slower than plain decoding, near the best fixed K where drafts pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.planning.slot_plan import TRIAL_ROUNDS
from tests.unit.planned_system import Pair, System


def cpu_step_s(num_slots: int, num_tokens: int) -> float:
    """Weights are read up to some seven tokens; more are computed."""
    return max(0.020 + 0.0008 * num_tokens, 0.004 + 0.0034 * num_tokens)


def gpu_step_s(num_slots: int, num_tokens: int) -> float:
    return 0.012 + 0.00002 * num_tokens + 0.0001 * max(0, num_tokens - 256)


def pair(step_s: object, acceptance: float, delay_s: float = 0.0, noise: float = 0.03) -> Pair:
    return Pair(
        step_s,  # type: ignore[arg-type]
        lambda num_proposals: 0.0012 + 0.00015 * num_proposals,
        lambda position: acceptance,
        delay_s,
        noise,
    )


DRAFTS = {"good": (0.8, 0.0), "fair": (0.55, 0.0), "poor": (0.002, 0.0), "slow": (0.55, 0.05)}


TARGETS = {"cpu": cpu_step_s, "gpu": gpu_step_s}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("target", "num_slots"), [("cpu", 1), ("cpu", 4), ("cpu", 16), ("gpu", 1)])
def test_never_slower_than_plain_and_near_the_best_fixed_k(target: str, num_slots: int, draft: str) -> None:
    true = pair(TARGETS[target], *DRAFTS[draft])
    seconds = 8.0 if num_slots <= 4 else 3.0 if target == "cpu" else 2.0
    counts = (0, 2, 4, 6) if num_slots <= 4 else (0, 3)
    fixed = {k: System(true, num_slots, k, seed=1).run(seconds) for k in counts}
    planned = System(true, num_slots, None, seed=1)
    planned.run(seconds)  # it learns
    rate = planned.run(seconds)
    assert rate >= 0.96 * fixed[0], fixed
    assert rate >= (0.92 if num_slots == 1 else 0.8) * max(fixed.values()), fixed


def test_drafts_resume_at_once_when_the_load_falls() -> None:
    system = System(pair(cpu_step_s, *DRAFTS["good"]), 32, None)
    system.run(20.0)
    before = len(system.chosen)
    system.run(5.0)
    assert sum(k > 0 for k in system.chosen[before:]) < 0.02 * (len(system.chosen) - before)
    system.set_slots(1)
    system.run(0.5)
    before = len(system.chosen)
    system.run(1.0)
    chosen = system.chosen[before:]
    assert sum(k > 0 for k in chosen) > 0.8 * len(chosen)


def test_a_draft_that_becomes_poor_is_left_and_one_that_becomes_good_is_found() -> None:
    true = pair(gpu_step_s, *DRAFTS["good"])
    system = System(true, 1, None)
    system.run(5.0)
    system.pair = replace(true, acceptance=lambda position: 0.0)
    system.run(3.0)
    assert sum(k > 0 for k in system.chosen[-100:]) <= TRIAL_ROUNDS
    system.pair = true
    system.run(60.0)
    assert sum(k > 0 for k in system.chosen[-50:]) > 40
