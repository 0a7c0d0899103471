"""Where an answer begins in a chat template's text."""

import pytest

from outrider.drafting.answer_start import AnswerStart
from outrider.drafting.lookup import Lookup
from outrider.drafting.ngram import Ngram
from outrider.drafting.sequence_drafter import SequenceDrafter
from tests.unit.outrider.drafting.drafting import said


@pytest.mark.parametrize("drafter", [Ngram(), Lookup(1, 8)], ids=["ngram", "lookup"])
def test_a_templates_marks_begin_no_answer(drafter: SequenceDrafter) -> None:
    begin, end, newline, hello = 1, 2, 3, 9
    prompt = [begin, 7, newline, 8, end, newline, begin, 7, newline, hello, end, newline, begin, 6, newline]
    follower = AnswerStart(drafter, {begin, end}).open(prompt, len(prompt))
    walk, proposed = follower.walk(), list[int]()
    while (counts := walk.next()) is not None and len(proposed) < 8:
        proposed += [int(counts[0][0])]
        walk.step(proposed[-1])
    assert not {begin, end} & set(proposed)
    follower.append([hello])
    assert set(said(follower) or ()) == {end}, "behind the first token they are proposed like any other"
    follower.truncate(len(prompt))
    assert begin not in (said(follower) or ())
