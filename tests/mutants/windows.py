"""Scaffolds of the target's own drafters: what is fed beside drafts, where it hangs, and whose it is."""

from tests.mutants import Mutant
from tests.mutants.operators import call, display, drop, never, operation, read, statement

LOOKAHEAD, PASS = "target_service:OwnLookahead", "target_service:OwnPass"
UNIT, STEPS, ROWS = ("tests/unit/test_lookahead.py",), ("tests/engine/test_turns.py",), ("tests/unit/test_rows.py",)

WINDOWS = (
    Mutant(
        f"{LOOKAHEAD}.open",
        statement("Lookahead", to="self._slots.setdefault(slot.key, next(iter(self._slots.values()), _0))"),
        "one pool for all: the speed of an answer tells of texts under other salts",
        UNIT,
    ),
    Mutant(
        "outrider.drafting:Lookahead.learn",
        display("list", to="[_0[-1:] + _0[:-1], _1, _2]"),
        "the window stands still while its columns move, and its n-grams are none",
        UNIT,
    ),
    Mutant(
        "outrider.drafting:Lookahead.parents",
        call("range", to="_f(_0 + 1, _1 + 1)", nth=(3, 3)),
        "columns hang one off, and nothing of what they bring comes true",
        UNIT,
    ),
    Mutant(
        f"{LOOKAHEAD}.scaffold",
        operation("+", to="_1"),
        "windows hang under the step's drafts",
        (*UNIT, *STEPS),
    ),
    Mutant(
        f"{PASS}.learn",
        never("path"),
        "what is said behind the last token is taken for what follows the drafts that were kept",
        ("tests/unit/test_own_pass.py",),
    ),
    Mutant(
        f"{PASS}.scaffold",
        display("range", to="[_0] * MAX_DRAFT_TOKENS"),
        "look-ahead ids hang side by side, and say what each says alone",
        ("tests/unit/test_own_pass.py",),
    ),
    Mutant(
        "outrider.training:Pass.guesses",
        operation("+", "1", to="_0"),
        "look-ahead embeddings are trained to say the token that they stand for",
        ("tests/engine/test_training.py",),
    ),
    Mutant(
        "target_service.verifier:_row",
        read("parents", to="[parent - 1 for parent in _]", nth=(2, 2)),
        "scaffolds hang a token too early",
        STEPS,
    ),
    Mutant(
        "target_service:_apart",
        call("split", to="_self.roll(1, 0).split(_0)"),
        "a step is decided by what is said behind tokens that nobody said",
        STEPS,
    ),
    Mutant(
        "target_service:RowRule.scaffolds",
        operation("+", "num_scaffolds", to="_0"),
        "windows are fed that do not pay for the drafts that they bring",
        ROWS,
    ),
    Mutant(
        "target_service:Scaffold.beside",
        operation("-", to="_0"),
        "beside fewer drafts than there were, ids hang under other ids than their own",
        ("tests/unit/test_own_pass.py",),
    ),
    Mutant(
        "target_service:Drafts.committed",
        drop("scaffold", "note"),
        "windows that bring nothing are fed for ever",
        ("tests/unit/test_lease.py",),
    ),
)
