"""A draft that is drafted for: a table's guesses and what is drawn."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import always, argument, call, drop, never

CASCADE, GROWER = "outrider.papers:Cascade", "draft_service:Grower"
DRAFTED_FOR = ("tests/unit/outrider/papers/test_cascade.py",)

CASCADES: Faults = {
    DRAFTED_FOR: {
        "a guess that was not drawn stays in the cache": Fault(f"{GROWER}._end_ahead", drop("keep_fed")),
        "what follows a guess is drawn from the row before it": Fault(
            "draft_service:ModelDrafter._read", call("distribution_of_logits", to="_f(_0, _1, _2, _3, _4 - (_1 < -1))")
        ),
        "a guess counts as drawn, whatever was": Fault(
            f"{CASCADE}.follow", call("child", to="next(iter(_self.children(_0)), None)")
        ),
        "a guess that was drawn is followed where the tree would not grow": Fault(
            f"{CASCADE}.follow", never("prob_ahead")
        ),
        "of several guesses the first is kept in place of that which was drawn": Fault(
            f"{CASCADE}.follow", argument("append", 0, to="0")
        ),
        "a table follows what is committed twice": Fault(f"{CASCADE}.commit_from", drop("truncate")),
        "what was drawn and guessed leaves later than what was not": Fault(
            f"{GROWER}.step", drop("push_due", nth=(1, 2))
        ),
        "guesses that there is no memory for fail the step": Fault("draft_service:Feeder.feed", always("any")),
    }
}
