"""The committed tokens of a slot, and how many slots a table holds."""

import pytest

from outrider.engine.worker.open_slots import MissingTokens
from outrider.wire.errors import InvalidRequest, Overloaded
from outrider.wire.requests.params import MAX_SALT_BYTES
from tests.unit.outrider.engine.worker.opened import PROMPT, make_table, open_slot, params


def test_commit_from_appends_repeats_and_rewrites() -> None:
    slot = open_slot()
    slot.commit_from(4, [9, 10])
    assert slot.committed == [5, 6, 7, 8, 9, 10]
    slot.commit_from(4, [9, 10])  # the same message again
    assert slot.committed == [5, 6, 7, 8, 9, 10]
    slot.commit_from(5, [11])
    assert slot.committed == [5, 6, 7, 8, 9, 11]
    slot.commit_from(0, [*PROMPT, 1])
    assert slot.committed == [*PROMPT, 1]


@pytest.mark.parametrize(("base_len", "ids"), [(2, []), (0, [1, 2, 3]), (4, [1] * 21), (-1, [1, 2, 3, 4, 5])])
def test_lengths_outside_prompt_and_max_tokens_are_refused(base_len: int, ids: list[int]) -> None:
    slot = open_slot()
    with pytest.raises(InvalidRequest, match="this slot holds 4 to 24"):
        slot.commit_from(base_len, ids)
    assert slot.committed == PROMPT


def test_open_past_the_context_limit_names_the_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt of 4 tokens plus max_tokens 61 is 65, the context limit is 64"):
        make_table().open(1, 1, PROMPT, 4, params(61))
    assert make_table().open(1, 1, PROMPT, 4, params(60)).max_len == 64


def test_slot_limit() -> None:
    table = make_table(max_slots=2)
    table.open(1, 1, PROMPT, 4, params())
    table.open(1, 2, PROMPT, 4, params())
    with pytest.raises(Overloaded, match="all 2 slots are in use"):
        table.open(2, 1, PROMPT, 4, params())
    table.open(1, 2, PROMPT, 4, params())  # a replacement takes no place
    table.close(1, 1)
    table.open(2, 1, PROMPT, 4, params())


def test_a_sender_that_is_ahead_receives_the_length_from_which_to_send() -> None:
    slot = open_slot()
    with pytest.raises(MissingTokens, match="base_len is 6, this slot knows 4 tokens; send again from 4") as found:
        slot.commit_from(6, [9])
    assert (found.value.committed_len, slot.committed) == (4, PROMPT)


@pytest.mark.parametrize(
    ("num_prompt", "source", "salt", "why"),
    [
        (5, (), b"", "num_prompt_tokens is 5, must be from 1 to 4"),
        (0, (), b"", "num_prompt_tokens is 0, must be from 1 to 4"),
        (4, (1, 2), b"", "a source of 2 tokens, and this worker reads none without an encoder"),
        (4, (), b"s" * (MAX_SALT_BYTES + 1), f"cache_salt has {MAX_SALT_BYTES + 1} bytes, at most {MAX_SALT_BYTES}"),
    ],
)
def test_an_open_that_is_refused_leaves_the_slot_of_the_same_key(
    num_prompt: int, source: tuple[int, ...], salt: bytes, why: str
) -> None:
    table = make_table()
    slot = open_slot(table)
    with pytest.raises(InvalidRequest, match=why):
        table.open(1, 1, PROMPT, num_prompt, params(), salt, source)
    assert table.get(1, 1) is slot
