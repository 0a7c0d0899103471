"""Drafts on their way into a step: the numbers that they are drawn with, what grows, what is buffered, what is waited
for.
"""

from tests.mutants import Mutant
from tests.mutants.operators import always, argument, call, comparison, drop, read, sibling, statement

TREE, BUFFER, DRAFTING = (
    "outrider.engine.speculation:GrowingTree",
    "target_service:DraftBuffer",
    "target_service:DraftChooser",
)
GROWTH = tuple(f"tests/unit/outrider/engine/speculation/test_{name}.py" for name in ("growth", "draft_tree", "drawing"))
BUFFERED = ("tests/unit/target_service/leases/test_draft_buffer.py",)
BLIND = (
    "tests/unit/outrider/engine/speculation/test_growth.py::test_under_rejection_growth_does_not_depend_on_values",
)
TIMES, STEPS = ("tests/unit/target_service/leases/test_lease.py",), ("tests/unit/target_service/step/test_step.py",)
BY_ACCEPTANCE = (
    "max(_0, key=lambda each: __import__('outrider.engine.sampling.noise', fromlist=['x']).host_slot_uniforms("
    "[lease.slot.params], [lease.length], [lease.length], [2])[0][0] if each.drafter else 0.5)"
)
CHAINS = ("tests/unit/outrider/engine/sampling/test_count_distribution.py",)
UNIONS = (
    "tests/unit/target_service/drafting/test_draft_chooser.py",
    "tests/unit/outrider/papers/test_merging.py",
    "tests/unit/outrider/engine/speculation/test_candidates.py",
)
TIMED = ("tests/law/test_law.py::TestADraftWhoseTimesDependOnItsTokens::test_the_law[target_service-True]",)

DELIVERIES = (
    Mutant(
        f"{TREE}.add_child",
        argument("prob", 0, "acceptance", to="token_id % 2"),
        "what is drawn decides by its value what is verified",
        BLIND,
    ),
    Mutant(
        f"{TREE}.add_child",
        always("RECOVERY"),
        "a branch is drawn with the trunk's numbers, at which block verification has looked",
        GROWTH,
    ),
    Mutant(
        f"{TREE}.commit_decided", always("_can_continue"), "a chain that is over is not followed by another", GROWTH
    ),
    Mutant(
        f"{TREE}.number_keys",
        call("range", to="[0] * _0"),
        "siblings are drawn with one number, and the second of them by what is left of the first one's",
        ("tests/unit/outrider/engine/speculation/test_growing_tree.py",),
    ),
    Mutant(
        f"{TREE}.number_keys",
        read("first_candidate", to="0"),
        "two drafts of one answer draw with the same numbers",
        GROWTH,
    ),
    Mutant(
        "gateway.rounds:DraftSession._open",
        call("replace", to="_0"),
        "two drafts of one answer are not told that they are two, and draw with the same numbers",
        ("tests/unit/gateway/rounds/test_decode_loop.py",),
    ),
    Mutant(
        "gateway.rounds:Decoder._advance",
        argument("advance", 0, to="self.target.tickets[0]"),
        "what the second draft delivers is taken for the first one's",
        ("tests/unit/gateway/rounds/test_decode_loop.py",),
    ),
    Mutant(
        "target_service:DraftChooser._proposed",
        call("max", to="max(_0, key=lambda each: list(map(lambda own: own.tree.ids, each.trees.values())))"),
        "what was sampled decides who drafts",
        UNIONS,
    ),
    Mutant(
        "target_service:Candidates.num_expected",
        call("sum", to="sum(item.prob for item in self.budget_items if item.nodes)"),
        "a chain that ended early, for what was sampled, promises less than one that did not",
        UNIONS,
    ),
    Mutant(
        "target_service:DraftChooser._proposed",
        call("max", to=BY_ACCEPTANCE),
        "the numbers by which a step accepts decide who drafts for it",
        UNIONS,
    ),
    Mutant(
        "gateway.workers:DraftUse.note",
        comparison(">", "MIN_GAIN", to="True"),
        "a draft that adds little is asked on, and takes of every step",
        ("tests/unit/gateway/workers/drafts/test_draft_use.py",),
    ),
    Mutant("outrider.engine.speculation:_draw", drop("0.0"), "siblings, and keys beside them, repeat an id", GROWTH),
    Mutant(
        "outrider.engine.speculation:propose_chain",
        sibling("OWN_DRAFT", "DRAFT"),
        "the target's own drafts are drawn with the numbers of a draft's chain that may lie in the same step",
        CHAINS,
    ),
    Mutant(
        f"{BUFFER}._add",
        comparison("!=", "distribution", to="False"),
        "two proposals for a state are taken for one",
        BUFFERED,
    ),
    Mutant(
        f"{BUFFER}.insert",
        drop("DETERMINISTIC", "SAMPLED"),
        "drafts that came too late are not counted as wasted",
        BUFFERED,
    ),
    Mutant(
        f"{BUFFER}.insert",
        comparison("==", "committed", to="True"),
        "drafts for another answer than the one that was committed are verified",
        BUFFERED,
    ),
    Mutant(
        f"{BUFFER}.insert",
        call("get", to="_f(_0, ROOT)", nth=(1, 2)),
        "what hangs under a token that got lost is verified after another",
        BUFFERED,
    ),
    Mutant(
        f"{BUFFER}.insert",
        comparison(">", to="False"),
        "a draft that sends large laws fills the target's memory",
        BUFFERED,
    ),
    Mutant(
        f"{BUFFER}.advance",
        call("sum", to="self.num_bytes"),
        "memory of drafts is counted for ever, until none is taken",
        BUFFERED,
    ),
    Mutant(
        "target_service:DeliveredDrafts.arrived",
        call("pop", to="_ if root_len == max(self.starved_since_s, default=0) else None"),
        "a target that is faster than its draft never learns how long it would have to wait",
        TIMES,
    ),
    Mutant(
        "target_service:DeliveredDrafts.arrived",
        drop("is_active"),
        "a draft that was late once is never waited for again",
        (*TIMES, *STEPS),
    ),
    Mutant(
        f"{DRAFTING}._buffered",
        call("chain", to="_ if len(_) >= lease.speculation.num_draft_tokens else []"),
        "a proposal is verified only when all of it is here, and the time that its first token takes decides",
        TIMED,
    ),
    Mutant(
        f"{DRAFTING}._draws",
        statement("return", to="return sorted(_0, key=lambda draw: joined.tree.ids[draw.node] % 2)", nth=(3, 3)),
        "what was drawn decides in which order the draws of several sources are tested",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTING}._draws",
        statement("return", to="return [*{draw.node: draw for draw in _0}.values()]", nth=(3, 3)),
        "a token that two sources drew is tested once",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTING}.pending",
        comparison(">", "drafts", to="False"),
        "what the second of two drafts drew decides whether the first one's draw is waited for",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTING}._delivered",
        read("is_active", to="True"),
        "a draft that nobody waits for comes in time where the draws of another are waited for",
        UNIONS,
    ),
    Mutant(
        "outrider.papers:merge",
        always("is_fixed"),
        "of two named trees the second one's draws decide how much is verified of the first",
        UNIONS,
    ),
    Mutant(
        "outrider.engine.speculation:CandidateTree.budget_items",
        read("max_len", to="0"),
        "how long the chain is that one source drew decides what is verified, of it and of others",
        UNIONS,
    ),
    Mutant(
        "target_service:_advance_buffer",
        argument("advance", 0, to="_ if len(lease.drafts) + len(lease.own_drafters) < 2 else _[:-1]"),
        "beside another source a draft's nodes are verified that were made for an older state",
        UNIONS,
    ),
    Mutant(
        f"{DRAFTING}._distribution",
        argument("refuse", 0, to="_ - 1"),
        "for what one draft delivers wrong another is given up",
        UNIONS,
    ),
    Mutant(
        "outrider.engine.speculation:join",
        call("child", to="_ if _ is None else _0"),
        "what a source says behind a token that both say is verified in its place",
        UNIONS,
    ),
    Mutant(
        "target_service:Proposal.drafter_of_node",
        call("items", to="reversed([*_])"),
        "a token that two sources say is counted for the later one",
        UNIONS,
    ),
)
