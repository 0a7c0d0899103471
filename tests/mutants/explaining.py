"""What is told of a round: where the target stood, what the draft drew from, and to nobody who did not send_request."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import always, argument, call, comparison, constant, drop, never

LAWS = ("tests/unit/target_service/step/test_explaining.py",)
SERVED = ("tests/service/test_target_service.py::test_an_explanation_changes_nothing_and_comes_to_those_who_ask",)

EXPLAINING: Faults = {
    LAWS: {
        "the target's best are told of the place before": Fault("target_service:explain", constant(1, to="0")),
        "what drafts do to penalties and the grammar is not told": Fault(
            "target_service:_add_rejection", argument("LogitRow", 1, to="()")
        ),
        "the law that is told is not the one that the refused token was drawn from": Fault(
            "target_service:_drawn_from", comparison("==", "parent", to="True")
        ),
        "what a delivery took is told of every step that verifies a part of it": Fault(
            "target_service:DraftBuffer.pop_cost_us", drop("us", "0")
        ),
    },
    SERVED: {
        "who did not ask is told, and waits for it": Fault("target_service:Step._decide", always("explain")),
        "who asks gets another answer": Fault(
            "target_service:Step._decide",
            call(
                "commit_sampled",
                to="_f(_0, Decided(_1.path, 0, _1.reported) if _0.lease.speculation.explain else _1, _2, _3, _4, _5)",
            ),
        ),
    },
    ("tests/unit/gateway/telemetry/test_round_metrics.py",): {
        "forced and predicted tokens are missing among those that are counted as accepted": Fault(
            "outrider.wire:TokenKind.counted", never()
        )
    },
}
