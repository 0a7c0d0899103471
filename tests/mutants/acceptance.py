"""Which drafts are kept, what replaces the first that is not, and where the answer is cut."""

from tests.mutants import Mutant

RULES, TREES = "outrider/engine/sampling/acceptance.py", "outrider/engine/sampling/tree_acceptance.py"
DECIDE, VERIFIER = "target_service/decide.py", "target_service/verifier.py"
COMMITTED = "target_service/commit.py"
LAW, TREE_LAW = ("tests/unit/test_acceptance_law.py",), ("tests/unit/test_tree_law.py",)
OUTCOMES, DECIDED = ("tests/unit/test_acceptance.py",), ("tests/unit/test_decide.py",)
COMMIT, STEPS = ("tests/unit/test_commit.py",), ("tests/engine/test_turns.py",)

ACCEPTANCE = (
    Mutant(
        RULES,
        "        if draft_prob > 0 and noise.accept[j] < target.prob(token_id) / draft_prob:\n            continue",
        "        if draft_prob > 0 and noise.accept[j] < 1.0:\n            continue",
        "every draft is kept, and the text is the draft's",
        LAW,
    ),
    Mutant(
        RULES,
        "        left = residual(target.probs(), lenience * draft.probs_at(target))",
        "        left = target.probs()",
        "what replaces a rejected draft is drawn from the target's own law, and likely tokens come too often",
        LAW,
    ),
    Mutant(
        RULES,
        "kept.append(min(1.0, kept[j] * targets[j].prob(token_id) / draft_prob)",
        "kept.append(min(1.0, targets[j].prob(token_id) / draft_prob)",
        "a block forgets how likely its beginning was",
        LAW,
    ),
    Mutant(
        RULES,
        "    whole = mass + 1.0 - kept\n    return mass / whole if whole > 0 else 1.0",
        "    return mass",
        "a block stops at a position more seldom than the law says",
        LAW,
    ),
    Mutant(
        RULES,
        "        left = (kept[n] * target.probs() - draft_laws[n].probs_at(target)).clip(min=0.0)",
        "        left = (target.probs() - draft_laws[n].probs_at(target)).clip(min=0.0)",
        "what follows a block's prefix is drawn from another block's residual",
        LAW,
    ),
    Mutant(
        RULES,
        "    return (kept & drafted).long().cumprod(dim=1).sum(dim=1)",
        "    return (kept & drafted).long().sum(dim=1)",
        "drafts after a rejected one are kept",
        OUTCOMES,
    ),
    Mutant(
        TREES,
        "            left = residual(left, draft.probs_at(target))\n",
        "",
        "the second sibling is tested as if the first had not been rejected",
        TREE_LAW,
    ),
    Mutant(
        TREES,
        "            draft = draft.without(token_id)",
        "            pass",
        "siblings are taken for draws with replacement",
        TREE_LAW,
    ),
    Mutant(
        DECIDE,
        "        if own != token_id:\n            return j, own",
        "        if own != token_id:\n            return j, token_id",
        "a wrong guess is committed under greedy and coupled",
        DECIDED,
    ),
    Mutant(
        DECIDE,
        "    return coupled_id(host.law(start + j, row), state.params, len(ready.slot.committed) + j)",
        "    return coupled_id(host.law(start + j, row), state.params, len(ready.slot.committed))",
        "coupled text depends on how many drafts a round had",
        DECIDED,
    ),
    Mutant(
        DECIDE,
        "    return lambda place, weights, ids: coupled_place(weights, ids, params, committed_len + place)",
        "    return lambda place, weights, ids: coupled_place(weights, ids, params, committed_len)",
        "the numbers that draw a bonus token are looked at again, at another position",
        DECIDED,
    ),
    Mutant(
        DECIDE,
        "    return LogitRow(state, tuple(ready.draft_ids[:j]))",
        "    return LogitRow(state)",
        "penalties do not advance through the draft tokens",
        DECIDED,
    ),
    Mutant(
        DECIDE,
        "            [len(r.slot.committed) for r in drafted for _ in r.draft_ids],\n",
        "            [0 for r in drafted for _ in r.draft_ids],\n",
        "a round uses the numbers that the round before has looked at",
        DECIDED,
    ),
    Mutant(
        RULES,
        "    at_next = torch.cat((keys[:, :3], keys[:, 3:] + num_accepted[:, None]), dim=1)",
        "    at_next = keys",
        "on a device a bonus token is drawn with the numbers of another position than on the host",
        OUTCOMES,
    ),
    Mutant(
        VERIFIER,
        "        self._keeper.truncate(job, keeps=self._leases.get(key) is not None)",
        "        self._keeper.truncate(job)",
        "an old Truncate crops a target that is ahead of it",
        STEPS,
    ),
    Mutant(
        COMMITTED,
        "        if token_id in stops and (num_now > params.min_tokens or params.grammar):",
        "        if token_id in stops:",
        "an answer stops before its minimum length",
        COMMIT,
    ),
    Mutant(
        COMMITTED,
        "        if num_now >= params.max_tokens:",
        "        if num_now > params.max_tokens:",
        "an answer is a token longer than was asked for",
        COMMIT,
    ),
    Mutant(
        COMMITTED,
        "            return Commit(tuple(tokens[: index + 1]), tuple(kinds[: index + 1]), Finish.STOP, token_id)",
        "            return Commit(tuple(tokens), tuple(kinds), Finish.STOP, token_id)",
        "accepted tokens after the end of the sequence are committed",
        COMMIT,
    ),
)
