"""Which target and which draft a request is given, from loads alone."""

import random
from collections import Counter
from dataclasses import replace

from gateway.workers.request_placement import (
    BALANCE,
    PREFIX_TOKENS,
    SLACK_SLOTS,
    WorkerLoad,
    choose_draft,
    choose_target,
    prefix_key,
)

KEYS = [prefix_key([seed, *range(300)], b"") for seed in range(2000)]


def idle(num: int) -> list[WorkerLoad]:
    return [WorkerLoad(f"target-{index}", 0, 64) for index in range(num)]


def test_prompts_that_begin_alike_go_to_the_same_target() -> None:
    targets = idle(5)
    shuffled = random.Random(0).sample(targets, 5)
    for key in KEYS[:50]:
        placed = choose_target(key, targets)
        assert placed is not None
        assert placed == choose_target(key, shuffled)


def test_prompts_spread_evenly_and_few_move_when_a_target_comes() -> None:
    before = {key: choose_target(key, idle(4)) for key in KEYS}
    counts = Counter(before.values())
    assert all(400 < count < 600 for count in counts.values()), counts
    moved = [key for key in KEYS if choose_target(key, idle(5)) != before[key]]
    assert len(moved) < len(KEYS) / 3.5
    for key in moved:
        assert choose_target(key, idle(5)) == "target-4", "those that moved went to the new one"


def test_a_key_is_of_the_beginning_and_the_salt() -> None:
    ids = list(range(PREFIX_TOKENS))
    assert prefix_key([*ids, 1], b"") == prefix_key([*ids, 2], b"")
    assert prefix_key(ids, b"") != prefix_key(ids, b"tenant")
    assert prefix_key([9, *ids], b"") != prefix_key(ids, b"")


def test_affinity_yields_to_the_least_loaded() -> None:
    loads = {load.name: 0 for load in idle(3)}
    for _ in range(60):
        placed = choose_target(KEYS[0], [WorkerLoad(name, count, 64) for name, count in loads.items()])
        assert placed is not None
        loads[placed] += 1
        assert max(loads.values()) <= BALANCE * sum(loads.values()) / len(loads) + SLACK_SLOTS + 1
    assert max(loads.values()) > min(loads.values()), "up to there the prefix decides"


def test_full_and_silent_targets_are_left_out_while_there_are_others() -> None:
    one, other = idle(2)
    preferred, second = (one, other) if choose_target(KEYS[0], [one, other]) == one.name else (other, one)
    for worse in (
        replace(preferred, num_choices=64),
        replace(preferred, kv_share=0.99),
        replace(preferred, is_silent=True),
    ):
        assert choose_target(KEYS[0], [worse, second]) == second.name
        assert choose_target(KEYS[0], [worse]) == worse.name, "it waits there"
    assert choose_target(KEYS[0], []) is None


def test_free_blocks_count_as_free_slots_do() -> None:
    """Three long requests weigh more than five short ones, and slots count by how many there are."""
    for key in KEYS[:20]:
        assert (
            choose_target(key, [WorkerLoad("long", 3, 64, kv_share=0.9), WorkerLoad("short", 5, 64, kv_share=0.05)])
            == "short"
        )
        assert choose_target(key, [WorkerLoad("small", 14, 16), WorkerLoad("large", 16, 64)]) == "large"


def test_a_draft_is_the_one_with_the_fewest_requests_then_the_nearest() -> None:
    far, near = WorkerLoad("far", 1, 64, rtt_s=0.01), WorkerLoad("near", 1, 64, rtt_s=0.001)
    assert choose_draft([far, near]) == "near"
    assert choose_draft([far, replace(near, num_choices=2)]) == "far"
    assert choose_draft([far, replace(near, is_silent=True)]) == "far"
    assert choose_draft([replace(near, num_choices=64)]) is None, "no slot: plain steps are better than a queue"
    assert choose_draft([]) is None
