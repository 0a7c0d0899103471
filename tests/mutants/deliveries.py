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
        "            parent.chance * self.plan.shares.share(token_id % 2),",
        "what is drawn decides by its value what is verified",
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
        "            [s.tree.plan.first_candidate + rank for s, rank in drawn],",
        "            [s.tree.plan.first_candidate for s, rank in drawn],",
        "siblings are drawn with one number, and the second of them by what is left of the first one's",
        ("tests/unit/test_tree_law.py",),
    ),
    Mutant(
        DRAWING,
        "            [s.tree.plan.first_candidate + rank for s, rank in drawn],",
        "            [rank for s, rank in drawn],",
        "two drafts of one answer draw with the same numbers",
        GROWTH,
    ),
    Mutant(
        "gateway/rounds/drafting.py",
        "replace(speculation, place=self._place).to_proto()",
        "speculation.to_proto()",
        "two drafts of one answer are not told that they are two, and draw with the same numbers",
        ("tests/unit/test_decode_loop.py",),
    ),
    Mutant(
        "gateway/rounds/decode_loop.py",
        "                draft.advance(ticket, target, self.target.member)",
        "                draft.advance(self.target.tickets[0], target, self.target.member)",
        "what the second draft delivers is taken for the first one's",
        ("tests/unit/test_decode_loop.py",),
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
        "        lacked_s = self.lacked.pop(root_len, None) if root_len == max(self.lacked, default=0) else None",
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
        "        return as_chain(draft.parked.chain(min(room, num_fixed or room)), share(0))\n",
        "        found = as_chain(draft.parked.chain(min(room, num_fixed or room)), share(0))\n"
        "        return found if len(found) >= min(room, num_fixed) else []\n",
        "a proposal is verified only when all of it is here, and the time that its first token takes decides",
        TIMED,
    ),
    Mutant(
        DRAFTS,
        "                drawn.setdefault(parent, []).append(Drawn(law, tuple(children)))",
        "                place = tree.ids[children[0]] % 2\n"
        "                drawn.setdefault(parent, []).insert(place, Drawn(law, tuple(children)))",
        "what was drawn decides in which order the draws of several sources are tested",
        UNIONS,
    ),
    Mutant(
        DRAFTS,
        "                drawn.setdefault(parent, []).append(Drawn(law, tuple(children)))",
        "                if not {node for each in drawn.get(parent, ()) for node in each.nodes} & {*children}:\n"
        "                    drawn.setdefault(parent, []).append(Drawn(law, tuple(children)))",
        "a token that two sources drew is tested once",
        UNIONS,
    ),
    Mutant(
        DRAFTS,
        "            if are_drawn and num_here:\n",
        "            if False:\n",
        "what the second of two drafts drew decides whether the first one's draw is waited for",
        UNIONS,
    ),
    Mutant(
        DRAFTS,
        "                draft.absent_len = 0 if draft.live else lease.length\n",
        "                draft.absent_len = 0\n",
        "a draft that nobody waits for comes in time where the draws of another are waited for",
        UNIONS,
    ),
    Mutant(
        UNITED,
        "    return found[:most] if named else sorted(",
        "    return sorted(",
        "of two named trees the second one's draws decide how much is verified of the first",
        UNIONS,
    ),
    Mutant(
        UNITED,
        "            chances = list(accumulate(repeat(share, part.most), mul))",
        "            chances = list(accumulate(repeat(share, len(part.nodes)), mul))",
        "how long the chain is that one source drew decides what is verified, of it and of others",
        UNIONS,
    ),
    Mutant(
        DRAFTS,
        "            num_given_up, num_late = draft.parked.advance(ids, committed_len,",
        "            num_given_up, num_late = draft.parked.advance(\n"
        "                ids if len(r.sources) < 2 else ids[:-1], committed_len,",
        "beside another source a draft's nodes are verified that were made for an older state",
        UNIONS,
    ),
    Mutant(
        DRAFTS,
        '            self._metrics.note_parked("refused", refused.draft.parked.clear())\n',
        '            self._metrics.note_parked("refused", lease.first.parked.clear())\n',
        "for what one draft delivers wrong another is given up",
        UNIONS,
    ),
    Mutant(
        UNITED,
        "                parents.append(above)\n            own.append(node)\n    return DraftTree",
        "                parents.append(above)\n                own.append(node)\n            else:\n"
        "                own.append(above)\n    return DraftTree",
        "what a source says behind a token that both say is verified in its place",
        UNIONS,
    ),
    Mutant(
        "target_service/lease.py",
        "        return [first.count(i) for i in range(len(self.sources))]",
        "        return [sum(node in each.ranks for node in nodes) for each in self.sources] if first else []",
        "a token that two sources say is counted twice",
        UNIONS,
    ),
)
