"""Beam search: what goes on, what has ended, and what of it lies in the cache."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import always, argument, call, comparison, comprehension, drop, never, operation, read

SEARCH, TARGET = "outrider.engine.speculation:BeamSearch", "target_service:Beams"
LAWS, DRAFTED = (
    ("tests/unit/outrider/engine/speculation/test_beam.py",),
    ("tests/unit/outrider/papers/test_beam_growth.py",),
)
ENGINE = "tests/unit/target_service/leases/test_slot_search.py"
STEPS, LOST, MOVED = (
    (f"{ENGINE}::test_drafts_change_no_answer_and_right_ones_save_steps",),
    (f"{ENGINE}::test_what_was_lost_is_fed_again_in_pieces",),
    (f"{ENGINE}::test_a_search_goes_on_from_its_levels_on_another_lease_and_on_another_target",),
)

BEAMS: Faults = {
    DRAFTED: {
        "a draft's beams are sorted without the target's sums, and are not the target's": Fault(
            "outrider.papers:BeamGrowth._choose_anew", read("_sums", to="[0.0] * len(_)")
        ),
        "a draft's beams go on behind what ends them, in place of those that the target chooses": Fault(
            "outrider.papers:BeamGrowth.extend", always("_stop_ids")
        ),
    },
    STEPS: {
        "a level is decided by what is said behind the best beam alone, though others were not fed": Fault(
            f"{TARGET}.decide",
            comprehension("child", to="(lambda rows: [rows[0] if row is None else row for row in rows])(_)"),
        )
    },
    LAWS: {
        "an answer's score is that of one a token shorter": Fault(
            f"{SEARCH}.apply", argument("_divisor", 0, to="max(1, _ - 1)")
        ),
        "a search ends by a length that no beam has": Fault(
            f"{SEARCH}._cannot_improve", call("len", "levels", to="_ + 1")
        ),
        "what ends costs a live beam its place": Fault(f"{SEARCH}.choose", comparison("==", to="True")),
        "too little is known of a beam whose best continuations end": Fault(
            f"{SEARCH}.num_candidates", operation("+", to="_0")
        ),
        'early_stopping "never" is that of false': Fault(f"{SEARCH}._cannot_improve", never("NEVER")),
    },
    LOST: {
        "what stays in the cache is taken one off, behind settled tokens that were fed with it": Fault(
            f"{TARGET}.advance", argument("append", 0, to="max(_ - 1, 0)")
        ),
        "beams hang under the first of the settled tokens that are fed with them, not the last": Fault(
            "outrider.engine.speculation:BeamTree.parents_of", read("root_at", to="min(_, 0)", nth=(1, 2))
        ),
        "a search that lost its memory feeds its whole tree at once, however large": Fault(
            f"{TARGET}._next_nodes", comparison("<=", to="True")
        ),
    },
    MOVED: {
        "a search that goes on elsewhere forgets the sums of its beams, and what has ended": Fault(
            f"{TARGET}.__init__", drop("apply")
        )
    },
    ("tests/unit/gateway/rounds/test_beam_session.py",): {
        "a slot that is opened again begins the search anew": Fault(
            "gateway.rounds:BeamSession.resumed", read("levels", to="[]")
        )
    },
}
