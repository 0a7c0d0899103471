"""What is told of a round: where the target stood, what the draft drew from, and to nobody who did not send_request."""

from tests.mutants import Mutant
from tests.mutants.operators import always, argument, call, comparison, constant, drop, never

LAWS = ("tests/unit/target_service/step/test_explaining.py",)
SERVED = ("tests/service/test_target_service.py::test_an_explanation_changes_nothing_and_comes_to_those_who_ask",)

EXPLAINING = (
    Mutant("target_service:explain", constant(1, to="0"), "the target's best are told of the place before", LAWS),
    Mutant(
        "target_service:_add_rejection",
        argument("LogitRow", 1, to="()"),
        "what drafts do to penalties and the grammar is not told",
        LAWS,
    ),
    Mutant(
        "target_service:_drawn_from",
        comparison("==", "parent", to="True"),
        "the law that is told is not the one that the refused token was drawn from",
        LAWS,
    ),
    Mutant("target_service:Step._decide", always("explain"), "who did not ask is told, and waits for it", SERVED),
    Mutant(
        "target_service:Step._decide",
        call(
            "commit_sampled",
            to="_f(_0, Decided(_1.path, 0, _1.reported) if _0.lease.speculation.explain else _1, _2, _3, _4, _5)",
        ),
        "who asks gets another answer",
        SERVED,
    ),
    Mutant(
        "target_service:DraftBuffer.pop_cost_us",
        drop("us", "0"),
        "what a delivery took is told of every step that verifies a part of it",
        LAWS,
    ),
    Mutant(
        "outrider.wire:TokenKind.counted",
        never(),
        "forced and predicted tokens are missing among those that are counted as accepted",
        ("tests/unit/gateway/telemetry/test_round_metrics.py",),
    ),
)
