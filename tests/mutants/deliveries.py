"""Drafts on their way into a step: the numbers that they are drawn with, what grows, what is buffered, what is waited
for.
"""

from tests.mutants import Fault, Faults
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

DELIVERIES: Faults = {
    BLIND: {
        "what is drawn decides by its value what is verified": Fault(
            f"{TREE}.add_child", argument("prob", 0, "acceptance", to="token_id % 2")
        )
    },
    GROWTH: {
        "a branch is drawn with the trunk's numbers, at which block verification has looked": Fault(
            f"{TREE}.add_child", always("RECOVERY")
        ),
        "a chain that is over is not followed by another": Fault(f"{TREE}.commit_decided", always("_can_continue")),
        "two drafts of one answer draw with the same numbers": Fault(
            f"{TREE}.number_keys", read("first_sample_index", to="0")
        ),
        "siblings, and keys beside them, repeat an id": Fault("outrider.engine.speculation:_draw", drop("0.0")),
    },
    ("tests/unit/outrider/engine/speculation/test_growing_tree.py",): {
        "siblings are drawn with one number, and the second of them by what is left of the first one's": Fault(
            f"{TREE}.number_keys", call("range", to="[0] * _0")
        )
    },
    ("tests/unit/gateway/rounds/test_decode_loop.py",): {
        "two drafts of one answer are not told that they are two, and draw with the same numbers": Fault(
            "gateway.rounds:DraftSession._open", call("replace", to="_0")
        ),
        "what the second draft delivers is taken for the first one's": Fault(
            "gateway.rounds:Decoder._advance", argument("advance", 0, to="self.target.tickets[0]")
        ),
    },
    UNIONS: {
        "what was sampled decides who drafts": Fault(
            "target_service:DraftChooser._proposed",
            call("max", to="max(_0, key=lambda each: list(map(lambda own: own.tree.ids, each.trees.values())))"),
        ),
        "a chain that ended early, for what was sampled, promises less than one that did not": Fault(
            "target_service:Candidates.num_expected",
            call("sum", to="sum(item.prob for item in self.budget_items if item.nodes)"),
        ),
        "the numbers by which a step accepts decide who drafts for it": Fault(
            "target_service:DraftChooser._proposed", call("max", to=BY_ACCEPTANCE)
        ),
        "what was drawn decides in which order the draws of several drafters are tested": Fault(
            f"{DRAFTING}._draws",
            statement("return", to="return sorted(_0, key=lambda draw: joined.tree.ids[draw.node] % 2)", nth=(3, 3)),
        ),
        "a token that two drafters drew is tested once": Fault(
            f"{DRAFTING}._draws",
            statement("return", to="return [*{draw.node: draw for draw in _0}.values()]", nth=(3, 3)),
        ),
        "what the second of two drafts drew decides whether the first one's draw is waited for": Fault(
            f"{DRAFTING}.pending", comparison(">", "drafts", to="False")
        ),
        "a draft that nobody waits for comes in time where the draws of another are waited for": Fault(
            f"{DRAFTING}._delivered", read("is_active", to="True")
        ),
        "of two named trees the second one's draws decide how much is verified of the first": Fault(
            "outrider.papers:merge", always("is_fixed")
        ),
        "how long the chain is that one drafter drew decides what is verified, of it and of others": Fault(
            "outrider.engine.speculation:CandidateTree.budget_items", read("max_len", to="0")
        ),
        "beside another drafter a draft's nodes are verified that were made for an older state": Fault(
            "target_service:_advance_buffer",
            argument("advance", 0, to="_ if len(lease.drafts) + len(lease.own_drafters) < 2 else _[:-1]"),
        ),
        "for what one draft delivers wrong another is given up": Fault(
            f"{DRAFTING}._distribution", argument("refuse", 0, to="_ - 1")
        ),
        "what a drafter says behind a token that both say is verified in its place": Fault(
            "outrider.engine.speculation:join", call("child", to="_ if _ is None else _0")
        ),
        "a token that two drafters say is counted for the later one": Fault(
            "target_service:Proposal.drafter_of_node", call("items", to="reversed([*_])")
        ),
    },
    ("tests/unit/gateway/workers/drafts/test_draft_use.py",): {
        "a draft that adds little is asked on, and takes of every step": Fault(
            "gateway.workers:DraftUse.note", comparison(">", "MIN_GAIN", to="True")
        )
    },
    CHAINS: {
        "the target's own drafts are drawn with the numbers of a draft's chain that may lie in the same step": Fault(
            "outrider.engine.speculation:propose_chain", sibling("OWN_DRAFT", "DRAFT")
        )
    },
    BUFFERED: {
        "two proposals for a state are taken for one": Fault(
            f"{BUFFER}._add", comparison("!=", "distribution", to="False")
        ),
        "drafts that came too late are not counted as wasted": Fault(
            f"{BUFFER}.insert", drop("DETERMINISTIC", "SAMPLED")
        ),
        "drafts for another answer than the one that was committed are verified": Fault(
            f"{BUFFER}.insert", comparison("==", "committed", to="True")
        ),
        "what hangs under a token that got lost is verified after another": Fault(
            f"{BUFFER}.insert", call("get", to="_f(_0, ROOT)", nth=(1, 2))
        ),
        "a draft that sends large laws fills the target's memory": Fault(
            f"{BUFFER}.insert", comparison(">", to="False")
        ),
        "memory of drafts is counted for ever, until none is taken": Fault(
            f"{BUFFER}.advance", call("sum", to="self.num_bytes")
        ),
    },
    TIMES: {
        "a target that is faster than its draft never learns how long it would have to wait": Fault(
            "target_service:SlotDraftWorker.arrived",
            call("pop", to="_ if root_len == max(self.starved_since_s, default=0) else None"),
        )
    },
    (*TIMES, *STEPS): {
        "a draft that was late once is never waited for again": Fault(
            "target_service:SlotDraftWorker.arrived", drop("is_active")
        )
    },
    TIMED: {
        "a proposal is verified only when all of it is here, and the time that its first token takes decides": Fault(
            f"{DRAFTING}._buffered", call("chain", to="_ if len(_) >= lease.speculation.num_draft_tokens else []")
        )
    },
}
