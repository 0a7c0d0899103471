"""FeatureBits that the target's own drafters have fed: what is fed beside drafts, where it hangs, and whose it is."""

from tests.mutants import Mutant
from tests.mutants.operators import call, drop, never, operation, read, statement, subscript

LOOKAHEAD, PASS = "outrider.papers:LookaheadDrafter", "outrider.papers:PassDrafter"
UNIT, STEPS = ("tests/unit/outrider/papers/test_lookahead.py",), ("tests/unit/target_service/step/test_step.py",)
PASS_TESTS = ("tests/unit/outrider/papers/test_pass_drafter.py",)
MERGED = (
    "tests/unit/target_service/drafting/test_draft_chooser.py",
    "tests/unit/target_service/drafting/test_slot_candidates.py",
)

WINDOWS = (
    Mutant(
        f"{LOOKAHEAD}.open",
        statement("Window", to="self._windows.setdefault(slot.key, next(iter(self._windows.values()), _0))"),
        "one pool for all: the speed of an answer tells of texts under other salts",
        UNIT,
    ),
    Mutant(
        "outrider.papers:Window.learn",
        subscript("window", to="_0[:-_1]", nth=(2, 2)),
        "the window stands still while its columns move, and its n-grams are none",
        UNIT,
    ),
    Mutant(
        f"{LOOKAHEAD}.extra_rows",
        operation("-", "window", to="_ + 1", nth=(2, 2)),
        "columns hang one off, and nothing of what they bring comes true",
        UNIT,
    ),
    Mutant(
        f"{LOOKAHEAD}.extra_rows",
        call("range", to="range(_1 - _0)"),
        "windows hang under the step's drafts",
        (*UNIT, *STEPS),
    ),
    Mutant(
        f"{PASS}.read",
        never("path"),
        "what is said behind the last token is taken for what follows the drafts that were kept",
        PASS_TESTS,
    ),
    Mutant(
        f"{PASS}.extra_rows",
        statement("parents", "+", to="pass"),
        "look-ahead ids hang side by side, and say what each says alone",
        PASS_TESTS,
    ),
    Mutant(
        "outrider.training:LookaheadEmbeddings.draft_logits",
        operation("+", "1", to="_0"),
        "look-ahead embeddings are trained to say the token that they stand for",
        ("tests/unit/outrider/training/test_pass_embeddings.py",),
    ),
    Mutant(
        "target_service:Proposal.row",
        read("parents", to="[parent - 1 for parent in _]", beside=("+=",)),
        "rows beside the drafts hang a token too early",
        STEPS,
    ),
    Mutant(
        "target_service:split_logits",
        subscript("logits", to="_0[_1 + 1 : _2 + 1]", nth=(1, 2)),
        "a step is decided by what is said behind tokens that nobody said",
        STEPS,
    ),
    Mutant(
        "target_service:Candidates.demand",
        drop("+=", "budget_items"),
        "windows are fed that do not pay for the drafts that they bring",
        MERGED,
    ),
    Mutant(
        "target_service:DraftChooser.proposal",
        call("_extra_rows", to="found.extra_rows"),
        "beside fewer drafts than there were, ids hang under other ids than their own",
        MERGED,
    ),
    Mutant(
        "target_service:learn",
        drop("own_drafters", "drafter", "note"),
        "windows that bring nothing are fed for ever",
        ("tests/unit/target_service/step/test_verdicts.py",),
    ),
)
