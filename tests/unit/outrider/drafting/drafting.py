"""What drafters without a model say, in a form to compare; and courses of a sequence for properties of them."""

from collections.abc import Callable

from hypothesis import strategies as st

from outrider.drafting.sequence_drafter import Counts, Follower, SequenceDrafter

VOCAB = 4
AHEAD = 6

Course = list[tuple[str, list[int] | float]]
"""append: these; truncate: to that share of its length; propose: along these guesses."""


def as_dict(counts: Counts | None) -> dict[int, float] | None:
    if counts is None:
        return None
    ids, numbers = counts
    assert ids.tolist() == sorted(set(ids.tolist())) and (numbers > 0).all() and len(ids) > 0
    return dict(zip(ids.tolist(), numbers.tolist(), strict=True))


def said(follower: Follower) -> dict[int, float] | None:
    """At the end of the sequence."""
    return as_dict(follower.walk().next())


def all_said(follower: Follower, guesses: list[int] | None = None) -> list[dict[int, float] | None]:
    """Along these guesses, or else along the first id that each place may have."""
    walk, found = follower.walk(), []
    for place in range(AHEAD if guesses is None else len(guesses)):
        found.append(as_dict(walk.next()))
        if found[-1] is None and guesses is None:
            break
        walk.step(next(iter(found[-1] or ())) if guesses is None else guesses[place])
    return found


ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)
courses: st.SearchStrategy[Course] = st.lists(
    st.one_of(
        st.tuples(st.just("append"), ids),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.just("propose"), ids),
    ),
    max_size=12,
)


def check_a_course(open_: Callable[[], SequenceDrafter], prompt: list[int], course: Course) -> None:
    """After each of its steps, a follower says what one says that was opened for the tokens as they are then."""
    follower, now = open_().open(prompt, len(prompt)), list(prompt)
    for what, value in course:
        if what == "truncate":
            assert isinstance(value, float)
            del now[max(len(prompt), int(value * len(now))) :]
            follower.truncate(len(now))
        elif what == "append":
            assert isinstance(value, list)
            now += value
            follower.append(value)
        else:
            assert isinstance(value, list)
            all_said(follower, value)
        fresh = open_().open(now, len(prompt))
        assert follower.num_tokens == fresh.num_tokens == len(now)
        assert all_said(follower) == all_said(fresh) and follower.has_next() == fresh.has_next()
