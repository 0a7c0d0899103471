"""What is told of a round: where the target stood, what the draft drew from, and to nobody who did not ask."""

from tests.mutants import Mutant
from tests.mutants.operators import always, argument, call, constant, never, subscript

LAWS = ("tests/unit/test_explaining.py",)
SERVED = ("tests/service/test_target_service.py::test_an_explanation_changes_nothing_and_comes_to_those_who_ask",)

EXPLAINING = (
    Mutant(
        "target_service:explain",
        constant(1, to="0"),
        "the target's best are told of the place before",
        LAWS,
    ),
    Mutant(
        "target_service:_target_best",
        argument("LogitRow", 1, to="()"),
        "what drafts do to penalties and the grammar is not told",
        LAWS,
    ),
    Mutant(
        "target_service:_draft_law",
        subscript("draft_laws", to="_0[max(0, last)]"),
        "the law that is told is not the one that the refused token was drawn from",
        LAWS,
    ),
    Mutant("target_service:Verifier._decide", always("explain"), "who did not ask is told, and waits for it", SERVED),
    Mutant(
        "target_service:Verifier._decide",
        call(
            "_commit",
            to="_f(_0, _1, replace(_2, next_id=0) if _0.speculation.explain else _2, _3, _4)",
        ),
        "who asks gets another answer",
        SERVED,
    ),
    Mutant(
        "target_service:Spent.take_us",
        constant(0, to="self.us"),
        "what a delivery took is told of every step that verifies a part of it",
        LAWS,
    ),
    Mutant(
        "outrider.wire:TokenKind.counted",
        never(),
        "forced and predicted tokens are missing among those that are counted as accepted",
        ("tests/unit/test_session.py",),
    ),
)
