"""Which drafts are kept, what replaces the first that is not, and where the answer is cut."""

from tests.mutants import Mutant
from tests.mutants.operators import (
    always,
    argument,
    call,
    comparison,
    drop,
    never,
    operation,
    subscript,
)

RULES = "outrider.engine.sampling"
LAW, TREE_LAW = ("tests/unit/test_acceptance_law.py",), ("tests/unit/test_tree_law.py",)
OUTCOMES, DECIDED = ("tests/unit/test_acceptance.py",), ("tests/unit/test_decide.py",)
COMMIT, STEPS = ("tests/unit/test_commit.py",), ("tests/engine/test_turns.py",)

ACCEPTANCE = (
    Mutant(f"{RULES}:accept_token_one", always("accept"), "every draft is kept, and the text is the draft's", LAW),
    Mutant(
        f"{RULES}:accept_token_one",
        call("residual", to="_0"),
        "what replaces a rejected draft is drawn from the target's own law, and likely tokens come too often",
        LAW,
    ),
    Mutant(
        f"{RULES}:accept_block_one",
        operation("*", "prob", to="_1"),
        "a block forgets how likely its beginning was",
        LAW,
    ),
    Mutant(
        f"{RULES}:_block_share",
        operation("/", to="_0"),
        "a block stops at a position more seldom than the law says",
        LAW,
    ),
    Mutant(
        f"{RULES}:accept_block_one",
        operation("*", "probs", to="_1"),
        "what follows a block's prefix is drawn from another block's residual",
        LAW,
    ),
    Mutant(f"{RULES}:_leading", call("cumprod", to="_self"), "drafts after a rejected one are kept", OUTCOMES),
    Mutant(
        f"{RULES}:_first_kept",
        drop("residual"),
        "the second sibling is tested as if the first had not been rejected",
        TREE_LAW,
    ),
    Mutant(f"{RULES}:_first_kept", drop("without"), "siblings are taken for draws with replacement", TREE_LAW),
    Mutant("target_service:_matching", never(), "a wrong guess is committed under greedy and coupled", DECIDED),
    Mutant(
        "target_service:_says",
        operation("+", "committed", to="_0"),
        "coupled text depends on how many drafts a round had",
        DECIDED,
    ),
    Mutant(
        "target_service:own_draw",
        operation("+", to="_0"),
        "the numbers that draw a bonus token are looked at again, at another position",
        DECIDED,
    ),
    Mutant(
        "target_service.decide:_row",
        call("LogitRow", to="_f(_0)"),
        "penalties do not advance through the draft tokens",
        DECIDED,
    ),
    Mutant(
        "target_service:slots_noise",
        argument("host_slot_uniforms", 1, to="[0] * len(_)"),
        "a round uses the numbers that the round before has looked at",
        DECIDED,
    ),
    Mutant(
        f"{RULES}:_with_next",
        operation("+", to="_0"),
        "on a device a bonus token is drawn with the numbers of another position than on the host",
        OUTCOMES,
    ),
    Mutant(
        "target_service:Verifier._truncate",
        call("truncate", to="_f(_0)"),
        "an old Truncate crops a target that is ahead of it",
        STEPS,
    ),
    Mutant(
        "target_service:commit_tokens",
        always("min_tokens", "grammar"),
        "an answer stops before its minimum length",
        COMMIT,
    ),
    Mutant(
        "target_service:commit_tokens",
        comparison(">=", "max_tokens", to="_0 > _1"),
        "an answer is a token longer than was asked for",
        COMMIT,
    ),
    Mutant(
        "target_service:commit_tokens",
        subscript(to="_0", beside=("STOP",), nth=(1, 2)),
        "accepted tokens after the end of the sequence are committed",
        COMMIT,
    ),
)
