"""FeatureBits that the target's own drafters have fed: what is fed beside drafts, where it hangs, and whose it is."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import call, drop, never, operation, read, statement, subscript

LOOKAHEAD, PASS = "outrider.papers:LookaheadDrafter", "outrider.papers:PassDrafter"
UNIT, STEPS = ("tests/unit/outrider/papers/test_lookahead.py",), ("tests/unit/target_service/step/test_step.py",)
PASS_TESTS = ("tests/unit/outrider/papers/test_pass_drafter.py",)
MERGED = (
    "tests/unit/target_service/drafting/test_draft_chooser.py",
    "tests/unit/target_service/drafting/test_slot_candidates.py",
)

WINDOWS: Faults = {
    UNIT: {
        "one pool for all: the speed of an answer tells of texts under other salts": Fault(
            f"{LOOKAHEAD}.open",
            statement("Window", to="self._windows.setdefault(slot.key, next(iter(self._windows.values()), _0))"),
        ),
        "the window stands still while its columns move, and its n-grams are none": Fault(
            "outrider.papers:Window.learn", subscript("window", to="_0[:-_1]", nth=(2, 2))
        ),
        "columns hang one off, and nothing of what they bring comes true": Fault(
            f"{LOOKAHEAD}.extra_rows", operation("-", "window", to="_ + 1", nth=(2, 2))
        ),
    },
    (*UNIT, *STEPS): {
        "windows hang under the step's drafts": Fault(f"{LOOKAHEAD}.extra_rows", call("range", to="range(_1 - _0)"))
    },
    PASS_TESTS: {
        "what is said behind the last token is taken for what follows the drafts that were kept": Fault(
            f"{PASS}.read", never("path")
        ),
        "look-ahead ids hang side by side, and say what each says alone": Fault(
            f"{PASS}.extra_rows", statement("parents", "+", to="pass")
        ),
    },
    ("tests/unit/outrider/training/test_pass_embeddings.py",): {
        "look-ahead embeddings are trained to say the token that they stand for": Fault(
            "outrider.training:LookaheadEmbeddings.draft_logits", operation("+", "1", to="_0")
        )
    },
    STEPS: {
        "rows beside the drafts hang a token too early": Fault(
            "target_service:Proposal.row", read("parents", to="[parent - 1 for parent in _]", beside=("+=",))
        ),
        "a step is decided by what is said behind tokens that nobody said": Fault(
            "target_service:split_logits", subscript("logits", to="_0[_1 + 1 : _2 + 1]", nth=(1, 2))
        ),
    },
    MERGED: {
        "windows are fed that do not pay for the drafts that they bring": Fault(
            "target_service:Candidates.demand", drop("+=", "budget_items")
        ),
        "beside fewer drafts than there were, ids hang under other ids than their own": Fault(
            "target_service:DraftChooser.proposal", call("_extra_rows", to="found.extra_rows")
        ),
    },
    ("tests/unit/target_service/step/test_verdicts.py",): {
        "windows that bring nothing are fed for ever": Fault(
            "target_service:learn", drop("own_drafters", "drafter", "note")
        )
    },
}
