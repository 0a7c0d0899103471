"""Whether a draft is worth asking."""

import pytest

from gateway.workers.draft_use import TRIAL, TRIAL_PERIOD, DraftUse


def test_a_draft_that_adds_nothing_is_tried_now_and_then() -> None:
    use, asked = DraftUse(), list[bool]()
    for _ in range(2 * TRIAL_PERIOD):
        asked.append(use.is_asked)
        use.note(0, 1)
    assert asked == 2 * [*[True] * TRIAL, *[False] * (TRIAL_PERIOD - TRIAL)]


@pytest.mark.parametrize(
    ("num_added", "num_others", "goes_on"),
    [(4, 16, True), (3, 16, False), (4, 40, False), (16, 40, True)],
    ids=["a fifth more", "less", "beside drafts of the target's own", "beside them a fifth more"],
)
def test_a_draft_is_asked_on_while_it_adds_a_fifth(num_added: int, num_others: int, goes_on: bool) -> None:
    use = DraftUse()
    for trial in range(3):
        for place in range(TRIAL):
            assert use.is_asked
            added = num_added // TRIAL + (place < num_added % TRIAL)
            use.note(added, added + num_others // TRIAL + (place < num_others % TRIAL))
        assert use.is_asked is goes_on
        if not goes_on:
            assert trial == 0
            break


def test_after_a_pause_a_trial_that_pays_begins_anew() -> None:
    use = DraftUse()
    for _ in range(TRIAL_PERIOD):
        use.note(0, 1)
    for _ in range(TRIAL):
        assert use.is_asked
        use.note(1, 2)
    assert use == DraftUse()
