"""Where a run of tokens is cut, at every position, and what each token is called."""

from collections.abc import Sequence

import pytest

from outrider.wire.kinds import TokenKind
from outrider.wire.requests.params import SamplingParams
from target_service.leases.lease_jobs import Finish
from target_service.step.commit import commit_tokens, kinds_of

DRAFTS, NEXT, EOS = (11, 12, 13, 14), 15, (0, 1)
RUN = (*DRAFTS, NEXT)
ALL_KEPT = (*[TokenKind.ACCEPTED] * 4, TokenKind.BONUS)
Commit = tuple[list[int], list[TokenKind], Finish | None]
"""Token ids, their kinds, and why they are the last."""


def commit(num_output: int = 0, drafts: tuple[int, ...] = DRAFTS, kept: int = 4, **params: object) -> Commit:
    made = SamplingParams(**{"max_tokens": 100, **params})
    token_ids, finish = commit_tokens(made, EOS, num_output, (*drafts[:kept], NEXT))
    return token_ids, kinds_of(kept, len(drafts), kept == len(drafts))[: len(token_ids)], finish


def cut(token_ids: Sequence[int], kinds: Sequence[TokenKind], finish: Finish | None = None) -> Commit:
    return list(token_ids), list(kinds), finish


@pytest.mark.parametrize("kept", range(5))
def test_kinds(kept: int) -> None:
    last = TokenKind.BONUS if kept == 4 else TokenKind.RECOVERED
    assert commit(kept=kept) == cut((*DRAFTS[:kept], NEXT), (*[TokenKind.ACCEPTED] * kept, last))


def test_a_plain_step() -> None:
    assert commit(drafts=(), kept=0) == cut((NEXT,), (TokenKind.PLAIN,))


@pytest.mark.parametrize("at", range(5))
def test_stop_ids_cut_anywhere(at: int) -> None:
    expected = cut(RUN[: at + 1], ALL_KEPT[: at + 1], Finish.STOP)
    assert commit(stop_token_ids=(RUN[at], 99)) == expected
    assert commit(stop_token_ids=(RUN[at], 99), ignore_eos=True) == expected
    assert commit(stop_token_ids=RUN[at:]) == expected, "the first one counts"


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("eos", EOS)
def test_end_of_sequence_cuts_anywhere(at: int, eos: int) -> None:
    run = [eos if j == at else token for j, token in enumerate(RUN)]
    params = SamplingParams(max_tokens=100)
    assert commit_tokens(params, EOS, 0, run) == (run[: at + 1], Finish.STOP)
    assert commit_tokens(SamplingParams(max_tokens=100, ignore_eos=True), EOS, 0, run) == (run, None)


def test_an_end_that_a_grammar_requires_is_one_before_min_tokens() -> None:
    """It comes so early only where nothing else may; a text without a grammar has no such place."""
    for grammar, token_ids in (("x", DRAFTS[:2]), ("", RUN)):
        assert commit(stop_token_ids=DRAFTS[1:2], min_tokens=9, grammar=grammar)[0] == list(token_ids)


@pytest.mark.parametrize("room", range(1, 5))
@pytest.mark.parametrize("num_output", [0, 7])
def test_max_tokens_cuts_anywhere(room: int, num_output: int) -> None:
    expected = cut(RUN[:room], ALL_KEPT[:room], Finish.LENGTH)
    assert commit(num_output, max_tokens=num_output + room) == expected


@pytest.mark.parametrize("at", range(5))
def test_a_stop_on_the_last_token_allowed_is_a_stop(at: int) -> None:
    token_ids, _, finish = commit(max_tokens=at + 1, stop_token_ids=(RUN[at],))
    assert (finish, token_ids[-1]) == (Finish.STOP, RUN[at])
    if at:
        assert commit(max_tokens=at, stop_token_ids=(RUN[at],))[2] is Finish.LENGTH


@pytest.mark.parametrize("min_tokens", range(6))
def test_stops_before_min_tokens_do_not_count(min_tokens: int) -> None:
    """The token after min_tokens outputs is the first that may end."""
    found = commit(stop_token_ids=RUN, min_tokens=min_tokens)
    if min_tokens < 5:
        assert found[0] == list(RUN[: min_tokens + 1]) and found[2] is Finish.STOP
    else:
        assert found == cut(RUN, ALL_KEPT)


def test_what_comes_after_a_rejection_is_not_looked_at() -> None:
    expected = cut((11, NEXT), (TokenKind.ACCEPTED, TokenKind.RECOVERED))
    assert commit(kept=1, stop_token_ids=(13,)) == expected
