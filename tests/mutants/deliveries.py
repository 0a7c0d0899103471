"""Drafts on their way into a step: the numbers that they are drawn with, what grows, what is parked, what is waited
for.
"""

from tests.mutants import Mutant
from tests.mutants.operators import (
    always,
    argument,
    call,
    comparison,
    condition,
    drop,
    never,
    operation,
    read,
    sibling,
    statement,
)

TREE, PARKED, DRAFTS = "outrider.engine.speculation:GrowingTree", "target_service:Parked", "target_service:Drafts"
GROWTH, PLACES = ("tests/unit/test_growing_tree.py",), ("tests/unit/test_parked.py",)
BLIND = ("tests/unit/test_growing_tree.py::test_under_rejection_growth_knows_no_values",)
TIMES, STEPS = ("tests/unit/test_lease.py",), ("tests/engine/test_turns.py",)
CHAINS, UNIONS = ("tests/unit/test_count_law.py",), ("tests/unit/test_united.py",)
TIMED = ("tests/law/test_law.py::TestADraftWhoseTimesDependOnItsTokens::test_the_law[target_service-True]",)

DELIVERIES = (
    Mutant(
        f"{TREE}.add",
        argument("share", 0, to="token_id % 2"),
        "what is drawn decides by its value what is verified",
        BLIND,
    ),
    Mutant(
        f"{TREE}.add",
        always("KEY"),
        "a branch is drawn with the trunk's numbers, at which block verification has looked",
        GROWTH,
    ),
    Mutant(f"{TREE}.advance", never("_goes_on"), "a chain that is over is not followed by another", GROWTH),
    Mutant(
        "outrider.engine.speculation:_uniforms",
        operation("+", "first_candidate", to="_0"),
        "siblings are drawn with one number, and the second of them by what is left of the first one's",
        ("tests/unit/test_tree_law.py",),
    ),
    Mutant(
        "outrider.engine.speculation:_uniforms",
        operation("+", "first_candidate", to="_1"),
        "two drafts of one answer draw with the same numbers",
        GROWTH,
    ),
    Mutant(
        "gateway.rounds:Drafting._open",
        call("replace", to="_0"),
        "two drafts of one answer are not told that they are two, and draw with the same numbers",
        ("tests/unit/test_decode_loop.py",),
    ),
    Mutant(
        "gateway.rounds:Decoder._advance",
        argument("advance", 0, to="self.target.tickets[0]"),
        "what the second draft delivers is taken for the first one's",
        ("tests/unit/test_decode_loop.py",),
    ),
    Mutant(
        "outrider.engine.speculation:_draw",
        drop("0.0"),
        "siblings, and keys beside them, repeat an id",
        GROWTH,
    ),
    Mutant(
        "target_service:grown_chain",
        sibling("OWN_DRAFT", "DRAFT"),
        "the target's own drafts are drawn with the numbers of a draft's chain that may lie in the same step",
        CHAINS,
    ),
    Mutant(
        f"{PARKED}._add",
        condition("law", "children", to="_ and len(nodes.ids) == 1"),
        "of two proposals for a state the longer one wins",
        PLACES,
    ),
    Mutant(
        f"{PARKED}.insert",
        drop("GUESS", "LAW"),
        "drafts that came too late are not counted as wasted",
        PLACES,
    ),
    Mutant(
        f"{PARKED}.insert",
        comparison("==", "committed", to="True"),
        "drafts for another answer than the one that was committed are verified",
        PLACES,
    ),
    Mutant(
        f"{PARKED}.insert",
        always("not", nth=(2, 3)),
        "what hangs under a token that got lost is verified after another",
        PLACES,
    ),
    Mutant(
        f"{PARKED}.insert",
        never("num_bytes", ">"),
        "a draft that sends large laws fills the target's memory",
        PLACES,
    ),
    Mutant(
        f"{PARKED}.advance",
        call("sum", to="self.num_bytes"),
        "memory of drafts is counted for ever, until none is taken",
        PLACES,
    ),
    Mutant(
        "target_service:Delivered.arrived",
        call("pop", to="_ if root_len == max(self.lacked, default=0) else None"),
        "a target that is faster than its draft never learns how long it would have to wait",
        TIMES,
    ),
    Mutant(
        "target_service:Delivered.arrived",
        statement("live", to="self.heard = _0"),
        "a draft that was late once is never waited for again",
        (*TIMES, *STEPS),
    ),
    Mutant(
        f"{DRAFTS}._parked",
        statement(
            "as_chain",
            to="found = _0\nreturn found if len(found) >= min(room, lease.speculation.num_draft_tokens) else []",
        ),
        "a proposal is verified only when all of it is here, and the time that its first token takes decides",
        TIMED,
    ),
    Mutant(
        f"{DRAFTS}._of_candidates",
        call(
            "replace",
            "drawn",
            to="_f(_0, tree=_tree, drawn={at: sorted(draws, key=lambda draw: _tree.ids[draw.nodes[0]] % 2)"
            " for at, draws in _drawn.items()})",
        ),
        "what was drawn decides in which order the draws of several sources are tested",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTS}._of_candidates",
        argument(
            "replace",
            "drawn",
            to="{at: [*{draw.nodes: draw for draw in draws}.values()] for at, draws in _.items()}",
        ),
        "a token that two sources drew is tested once",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTS}.lacking",
        comparison(">", "drafts", to="False"),
        "what the second of two drafts drew decides whether the first one's draw is waited for",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTS}._delivered",
        always("live"),
        "a draft that nobody waits for comes in time where the draws of another are waited for",
        UNIONS,
    ),
    Mutant(
        "target_service:in_turn",
        never("named"),
        "of two named trees the second one's draws decide how much is verified of the first",
        UNIONS,
    ),
    Mutant(
        "target_service:in_turn",
        read("most", to="len(_0.nodes)", beside=("repeat",)),
        "how long the chain is that one source drew decides what is verified, of it and of others",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTS}.committed",
        argument("advance", 0, to="_ if len(r.sources) < 2 else _[:-1]"),
        "beside another source a draft's nodes are verified that were made for an older state",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTS}._with_candidates",
        read("draft", to="found.lease.first", beside=("note_parked",)),
        "for what one draft delivers wrong another is given up",
        UNIONS,
    ),
    Mutant(
        "target_service:joined",
        call("setdefault", to="_0[0] if _0 in _self else _"),
        "what a source says behind a token that both say is verified in its place",
        UNIONS,
    ),
    Mutant(
        "target_service:Ready.num_of",
        statement("count", to="return [sum(node in each.ranks for node in nodes) for each in self.sources]"),
        "a token that two sources say is counted twice",
        UNIONS,
    ),
)
