"""Which target and which draft a request is given, from loads alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from gateway.placement import BALANCE, PREFIX_TOKENS, Load, Placed, Why, choose_draft, choose_target, prefix_key

KEYS = [prefix_key([seed, *range(300)], b"") for seed in range(2000)]


def idle(num: int) -> list[Load]:
    return [Load(f"target-{index}", 0, 64) for index in range(num)]


def test_prompts_that_begin_alike_go_to_the_same_target() -> None:
    targets = idle(5)
    shuffled = random.Random(0).sample(targets, 5)
    for key in KEYS[:50]:
        placed = choose_target(key, targets)
        assert placed == choose_target(key, shuffled)
        assert placed is not None
        assert placed.why is Why.AFFINITY


def test_prompts_spread_evenly_and_few_move_when_a_target_comes() -> None:
    before = {key: choose_target(key, idle(4)) for key in KEYS}
    counts = Counter(placed.name for placed in before.values() if placed)
    assert all(400 < count < 600 for count in counts.values()), counts
    moved = [key for key in KEYS if choose_target(key, idle(5)) != before[key]]
    assert len(moved) < len(KEYS) / 3.5
    for key in moved:
        placed = choose_target(key, idle(5))
        assert placed is not None
        assert placed.name == "target-4", "those that moved went to the new one"


def test_a_key_is_of_the_beginning_and_the_salt() -> None:
    ids = list(range(PREFIX_TOKENS))
    assert prefix_key([*ids, 1], b"") == prefix_key([*ids, 2], b"")
    assert prefix_key(ids, b"") != prefix_key(ids, b"tenant")
    assert prefix_key([9, *ids], b"") != prefix_key(ids, b"")


def test_affinity_yields_to_the_least_loaded_once_a_target_holds_clearly_more_than_its_share() -> None:
    loads = {load.name: 0 for load in idle(3)}
    for _ in range(60):
        placed = choose_target(KEYS[0], [Load(name, count, 64) for name, count in loads.items()])
        assert placed is not None
        loads[placed.name] += 1
        share = sum(loads.values()) / len(loads)
        assert max(loads.values()) <= BALANCE * share + 1
    assert max(loads.values()) > min(loads.values()), "up to there the prefix decides"


def test_full_and_silent_targets_are_left_out_while_there_are_others() -> None:
    one, other = idle(2)
    first = choose_target(KEYS[0], [one, other])
    assert first is not None
    preferred, second = (one, other) if first.name == one.name else (other, one)
    for worse in (
        replace(preferred, num_requests=64),
        replace(preferred, kv_share=0.99),
        replace(preferred, silent=True),
    ):
        placed = choose_target(KEYS[0], [worse, second])
        assert placed is not None
        assert placed.name == second.name
        assert choose_target(KEYS[0], [worse]) == Placed(worse.name, Why.AFFINITY) or worse.num_requests == 64
    assert choose_target(KEYS[0], [replace(preferred, num_requests=64)]) is not None, "it waits there"
    assert choose_target(KEYS[0], []) is None


def test_a_draft_is_the_one_with_the_fewest_requests_then_the_nearest() -> None:
    far, near = Load("far", 1, 64, rtt_s=0.01), Load("near", 1, 64, rtt_s=0.001)
    assert choose_draft([far, near]) == "near"
    assert choose_draft([far, replace(near, num_requests=2)]) == "far"
    assert choose_draft([far, replace(near, silent=True)]) == "far"
    assert choose_draft([replace(near, num_requests=64)]) is None, "no slot: plain steps are better than a queue"
    assert choose_draft([]) is None
