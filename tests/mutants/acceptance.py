"""Which drafts are kept, what replaces the first that is not, and where the answer is cut."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import always, argument, call, comparison, display, drop, operation

RULES = "outrider.engine.sampling"
LAW, TREE_LAW = (
    ("tests/unit/outrider/engine/sampling/test_acceptance_law.py",),
    ("tests/unit/outrider/engine/speculation/test_growing_tree.py",),
)
DECIDED, TREES, COMMIT = (
    ("tests/unit/target_service/step/test_decide.py",),
    ("tests/unit/target_service/step/test_decide_on_device.py",),
    ("tests/unit/target_service/step/test_commit.py",),
)
VERIFIER = ("tests/unit/target_service/step/test_verifier.py",)

ACCEPTANCE: Faults = {
    (*LAW, *TREE_LAW): {
        "every draw is accepted, and the text is the draft's": Fault(f"{RULES}:accept_draw", always("<")),
        "what replaces a rejected draft is drawn from the target's own law, and likely tokens come too often": Fault(
            f"{RULES}:accept_draw", display("None", to="(_0, target.weights)", nth=(2, 2))
        ),
    },
    LAW: {
        "a block forgets how likely its beginning was": Fault(
            f"{RULES}:accept_block_one", operation("*", "prob", to="_1")
        ),
        "a block stops at a position more seldom than the law says": Fault(
            f"{RULES}:_block_share", operation("/", to="_0")
        ),
        "what follows a block's prefix is drawn from another block's residual": Fault(
            f"{RULES}:accept_block_one", operation("*", "probs", to="_1")
        ),
    },
    TREES: {
        "on a device what follows an accepted draw is tested, too": Fault(
            f"{RULES}:accept_draws", comparison("<", "0", to="_0 == _0", nth=(1, 2))
        )
    },
    TREE_LAW: {
        "the second sibling is tested as if the first had not been rejected": Fault(
            f"{RULES}:accept_draw", drop("residual")
        ),
        "siblings are taken for draws with replacement": Fault(f"{RULES}:accept_draw", drop("without")),
    },
    DECIDED: {
        "a wrong guess is committed under greedy and coupled": Fault(
            "target_service:walk", call("child", to="next(iter(_self.children(_0)), None)")
        ),
        "coupled text depends on how many drafts a round had": Fault(
            "target_service:_decide_slot.matching_id", operation("+", to="_0")
        ),
        "the numbers that draw a bonus token are looked at again, at another position": Fault(
            "target_service:_decide_slot", argument("coupled_index", 3, to="_0")
        ),
        "penalties do not advance through the draft tokens": Fault(
            "target_service:_decide_slot.distribution_after", call("LogitRow", to="_f(_0)")
        ),
        "a round uses the numbers that the round before has looked at": Fault(
            "target_service:StepRows.__init__", argument("host_slot_uniforms", 1, to="[0] * len(_)")
        ),
        "on a device a bonus token is drawn with the numbers of another position than on the host": Fault(
            f"{RULES}:accept_block", operation("+", "keys", to="_0")
        ),
    },
    VERIFIER: {
        "an old Truncate crops a target that is ahead of it": Fault(
            "target_service:Verifier._truncate", call("truncate", to="_f(_0)")
        )
    },
    COMMIT: {
        "an answer stops before its minimum length": Fault(
            "target_service:commit_tokens", always("min_tokens", "grammar")
        ),
        "an answer is a token longer than was asked for": Fault(
            "target_service:commit_tokens", comparison(">=", "max_tokens", to="_0 > _1")
        ),
        "accepted tokens after the end of the sequence are committed": Fault(
            "target_service:commit_tokens", drop("break")
        ),
    },
}
