"""Drafts on their way into a step: the numbers that they are drawn with, what grows, what is parked, what is waited
for.
"""

from tests.mutants import Mutant

TREE, DRAWING = "outrider/engine/speculation/tree.py", "outrider/engine/speculation/drawing.py"
PARKED, LEASE, DRAFTS = "target_service/parked.py", "target_service/lease.py", "target_service/drafts.py"
OWN, UNITED = "target_service/chains.py", "target_service/united.py"
GROWTH, PLACES = ("tests/unit/test_growing_tree.py",), ("tests/unit/test_parked.py",)
BLIND = ("tests/unit/test_growing_tree.py::test_under_rejection_growth_knows_no_values",)
TIMES, STEPS = ("tests/unit/test_lease.py",), ("tests/engine/test_turns.py",)
CHAINS, UNIONS = ("tests/unit/test_count_law.py",), ("tests/unit/test_united.py",)
TIMED = ("tests/law/test_law.py::TestADraftWhoseTimesDependOnItsTokens::test_the_law[target_service-True]",)

DELIVERIES = (
    Mutant(
        TREE,
        "            parent.chance * self.plan.shares.share(rank),",
        "            parent.chance * prob,",
        "what is drawn decides by its probability what is verified",
        BLIND,
    ),
    Mutant(
        TREE,
        "        return self._determined and node.confidence < self._speculation.min_confidence",
        "        return node.confidence < self._speculation.min_confidence",
        "a draft that doubts what it drew leaves out what follows",
        BLIND,
    ),
    Mutant(
        TREE,
        "        rank, goes_on = len(parent.children), not self._determined and kind is not NodeKind.KEY",
        "        rank, goes_on = len(parent.children), not self._determined",
        "a branch is drawn with the trunk's numbers, at which block verification has looked",
        GROWTH,
    ),
    Mutant(
        TREE,
        "        if not self._goes_on(node):",
        "        if False:",
        "a chain that is over is not followed by another",
        GROWTH,
    ),
    Mutant(
        DRAWING,
        "            [rank for _, rank in drawn],",
        "            [0 for _, rank in drawn],",
        "siblings are drawn with one number, and the second of them by what is left of the first one's",
        ("tests/unit/test_tree_law.py",),
    ),
    Mutant(
        DRAWING,
        "        weights[place] = 0.0\n",
        "",
        "siblings, and keys beside them, repeat an id",
        GROWTH,
    ),
    Mutant(
        OWN,
        "purpose=Purpose.OWN_DRAFT",
        "purpose=Purpose.DRAFT",
        "the target's own drafts are drawn with the numbers of a draft's chain that may lie in the same step",
        CHAINS,
    ),
    Mutant(
        PARKED,
        "            if (drawn and drawn[0].law != law) or (parent.children and not drawn):",
        "            if ((drawn and drawn[0].law != law) or (parent.children and not drawn)) and len(nodes.ids) == 1:",
        "of two proposals for a state the longer one wins",
        PLACES,
    ),
    Mutant(
        PARKED,
        "                    late += nodes.kinds[index] in (NodeKind.GUESS, NodeKind.LAW)\n",
        "",
        "drafts that came too late are not counted as wasted",
        PLACES,
    ),
    Mutant(
        PARKED,
        "                if committed[length] == token_id:",
        "                if True:",
        "drafts for another answer than the one that was committed are verified",
        PLACES,
    ),
    Mutant(
        PARKED,
        "            elif child is None and not is_known[index]:",
        "            elif child is None:",
        "what hangs under a token that got lost is verified after another",
        PLACES,
    ),
    Mutant(
        PARKED,
        " and self.num_bytes + num_bytes > most_bytes:",
        " and False:",
        "a draft that sends large laws fills the target's memory",
        PLACES,
    ),
    Mutant(
        PARKED,
        "        self.num_nodes, self.num_bytes = len(below), sum(each.num_bytes for each in below)",
        "        self.num_nodes = len(below)",
        "memory of drafts is counted for ever, until none is taken",
        PLACES,
    ),
    Mutant(
        LEASE,
        "        lacked_s = self.lacked.pop(root_len, None)",
        "        lacked_s = self.lacked.pop(root_len, None) if root_len == len(self.slot.committed) else None",
        "a target that is faster than its draft never learns how long it would have to wait",
        TIMES,
    ),
    Mutant(
        LEASE,
        "        self.live = self.heard = True",
        "        self.heard = True",
        "a draft that was late once is never waited for again",
        (*TIMES, *STEPS),
    ),
    Mutant(
        DRAFTS,
        "        nodes = as_chain(lease.parked.chain(min(room, num_fixed or room)), lease.shares.share(0))\n"
        "        return Candidates(lease, nodes,",
        "        nodes = as_chain(lease.parked.chain(min(room, num_fixed or room)), lease.shares.share(0))\n"
        "        nodes = nodes if len(nodes) >= min(room, num_fixed) else []\n"
        "        return Candidates(lease, nodes,",
        "a proposal is verified only when all of it is here, and the time that its first token takes decides",
        TIMED,
    ),
    Mutant(
        DRAFTS,
        "                drawn.setdefault(tree.parents[node], []).append(Drawn(draft.law, (node,)))",
        "                place = draft.token_id % 2\n"
        "                drawn.setdefault(tree.parents[node], []).insert(place, Drawn(draft.law, (node,)))",
        "what was drawn decides in which order the draws of two sources are tested",
        UNIONS,
    ),
    Mutant(
        DRAFTS,
        "            if draft.kind is NodeKind.LAW:\n                assert",
        "            if draft.kind is NodeKind.LAW and node not in range(len(nodes)):\n                assert",
        "a token that two sources drew is tested once",
        UNIONS,
    ),
    Mutant(
        DRAFTS,
        "        order = in_turn(delivered.nodes, depth, chances, most)",
        "        order = in_turn(delivered.nodes, len(chain), chances, most)",
        "how long the chain is that one source drew decides what is verified of the other's",
        UNIONS,
    ),
    Mutant(
        DRAFTS,
        "        given_up, late = lease.parked.advance(ids, committed_len, lease.shares.note if determined else None)",
        "        given_up, late = lease.parked.advance(\n"
        "            ids if r.sources is None else ids[:-1], committed_len, lease.shares.note if determined else None\n"
        "        )",
        "beside the chain a draft's nodes are verified that were made for an older state",
        UNIONS,
    ),
    Mutant(
        UNITED,
        "            parents.append(at)\n        at = node\n    return DraftTree",
        "            parents.append(at)\n        at = node if node >= len(delivered) else at\n    return DraftTree",
        "what a source says behind a token that both say is verified in its place",
        UNIONS,
    ),
)
