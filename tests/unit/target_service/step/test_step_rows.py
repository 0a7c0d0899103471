"""What of a step's rows is sound."""

from types import SimpleNamespace
from typing import Any

from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.requests.params import SamplingParams
from target_service.step.decide import until_grammar_fails
from target_service.step.step_rows import Decided


def test_what_was_accepted_before_its_grammar_fails_is_sound() -> None:
    """Up to the token that leads there, which takes the place of the target's own; behind it nothing is masked."""
    proposal: Any = SimpleNamespace(tree=DraftTree.of([5, 6, 7], [ROOT, 0, 1]))
    decided = Decided((0, 1, 2), 9)
    for fails_behind, path, next_id in ((2, (0,), 6), (3, (0, 1), 7), (4, (0, 1, 2), 9)):
        state: Any = SimpleNamespace(
            params=SamplingParams(grammar="{}"), failure=lambda ids, n=fails_behind: "full" if len(ids) >= n else None
        )
        assert until_grammar_fails(proposal, state, decided) == Decided(path, next_id)
    state = SimpleNamespace(params=SamplingParams(grammar="{}"), failure=lambda ids: "full")
    assert until_grammar_fails(proposal, state, decided) is None
