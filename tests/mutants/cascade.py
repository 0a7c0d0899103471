"""A draft that is drafted for: a table's guesses and what is drawn."""

from tests.mutants import Mutant
from tests.mutants.operators import always, argument, call, drop, never

CASCADE, GROWER = "outrider.papers:Cascade", "draft_service:Grower"
DRAFTED_FOR = ("tests/unit/outrider/papers/test_cascade.py",)

CASCADES = (
    Mutant(f"{GROWER}._end_ahead", drop("keep_fed"), "a guess that was not drawn stays in the cache", DRAFTED_FOR),
    Mutant(
        "draft_service:ModelDrafter._read",
        call("distribution_of_logits", to="_f(_0, _1, _2, _3, _4 - (_1 < -1))"),
        "what follows a guess is drawn from the row before it",
        DRAFTED_FOR,
    ),
    Mutant(
        f"{CASCADE}.follow",
        call("child", to="next(iter(_self.children(_0)), None)"),
        "a guess counts as drawn, whatever was",
        DRAFTED_FOR,
    ),
    Mutant(
        f"{CASCADE}.follow",
        never("prob_ahead"),
        "a guess that was drawn is followed where the tree would not grow",
        DRAFTED_FOR,
    ),
    Mutant(
        f"{CASCADE}.follow",
        argument("append", 0, to="0"),
        "of several guesses the first is kept in place of that which was drawn",
        DRAFTED_FOR,
    ),
    Mutant(f"{CASCADE}.commit_from", drop("truncate"), "a table follows what is committed twice", DRAFTED_FOR),
    Mutant(
        f"{GROWER}.step",
        drop("push_due", nth=(1, 2)),
        "what was drawn and guessed leaves later than what was not",
        DRAFTED_FOR,
    ),
    Mutant(
        "draft_service:Feeder.feed", always("any"), "guesses that there is no memory for fail the step", DRAFTED_FOR
    ),
)
