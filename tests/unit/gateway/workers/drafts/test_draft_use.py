"""Whether a draft is worth asking."""

import pytest

from gateway.workers.drafts.draft_use import TRIAL, TRIAL_PERIOD, DraftUse


def test_a_draft_that_adds_nothing_is_tried_now_and_then() -> None:
    use, asked = DraftUse(), list[bool]()
    for _ in range(2 * TRIAL_PERIOD):
        asked.append(use.is_in_use)
        use.note(0, 1, is_ready=True)
    assert asked == 2 * [*[True] * TRIAL, *[False] * (TRIAL_PERIOD - TRIAL)]


@pytest.mark.parametrize(
    ("num_added", "num_others", "goes_on"),
    [(4, 16, True), (3, 16, False), (4, 40, False), (16, 40, True)],
    ids=["a fifth more", "less", "beside drafts of the target's own", "beside them a fifth more"],
)
def test_a_draft_stays_in_use_while_it_adds_a_fifth(num_added: int, num_others: int, goes_on: bool) -> None:
    use = DraftUse()
    for trial in range(3):
        for place in range(TRIAL):
            assert use.is_in_use
            added = num_added // TRIAL + (place < num_added % TRIAL)
            num_tokens = added + num_others // TRIAL + (place < num_others % TRIAL)
            use.note(added, num_tokens, is_ready=True)
        assert use.is_in_use is goes_on
        if not goes_on:
            assert trial == 0
            break


def test_after_a_pause_a_trial_that_pays_begins_anew() -> None:
    use = DraftUse()
    for _ in range(TRIAL_PERIOD):
        use.note(0, 1, is_ready=False)
    for _ in range(TRIAL):
        assert use.is_in_use
        use.note(1, 2, is_ready=False)
    assert use.num_verdicts == 0


def test_what_earlier_trials_brought_outweighs_one_that_brings_little() -> None:
    use = DraftUse()
    for added in [*[1] * TRIAL, *[0] * TRIAL]:
        use.note(added, 1 + added, is_ready=True)
    assert use.num_verdicts == 0
    for _ in range(3 * TRIAL):
        use.note(0, 1, is_ready=True)
    assert not use.is_in_use


def test_draft_tokens_were_ready_where_one_verdict_of_the_last_trial_had_some() -> None:
    use = DraftUse()
    for place in range(TRIAL_PERIOD):
        use.note(0, 1, is_ready=place == 3)
    assert use.had_drafts
    use.note(0, 1, is_ready=False)
    assert not use.had_drafts
