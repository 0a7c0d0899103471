"""A request's grammar: masks, who wins, and what it forces."""

from tests.mutants import Mutant

FOLLOWED, PENALTIES = "outrider/engine/sampling/grammar.py", "outrider/engine/sampling/penalties.py"
HOST, DRAWING = "outrider/engine/sampling/host_sampling.py", "outrider/engine/speculation/drawing.py"
DECIDE, COMMITTED = "target_service/decide.py", "target_service/commit.py"
OWN = "tests/unit/test_grammar.py"

GRAMMAR = (
    Mutant(
        FOLLOWED,
        "        place = self._masked(draft_prefix)",
        "        place = self._masked(())",
        "the mask does not go on along the drafts: what follows them breaks the grammar",
        (f"{OWN}::TestMasks",),
    ),
    Mutant(
        FOLLOWED,
        "        if self._output != ids[:known]:",
        "        if known > len(ids):",
        "tokens that were taken back still count for the grammar",
        (f"{OWN}::TestMasks",),
    ),
    Mutant(
        FOLLOWED,
        "        self.grammars.forget(self)",
        "        pass",
        "what other requests met ends all that come later",
        (f"{OWN}::TestWhatCannotBeFollowed",),
    ),
    Mutant(
        DRAWING,
        "    weights = law.weights.copy()",
        "    weights = np.maximum(law.weights, 0.1)",
        "a draft draws what the grammar forbids, and ships its law as masked: the mask is on the target alone",
        ("tests/unit/test_tree_law.py::TestExactLaw::test_laws_that_a_grammar_masks",),
    ),
    Mutant(
        HOST,
        "        return law_of(self._processed(index, row), row.state.params)",
        "        law, allowed = law_of(self._rows[index], row.state.params), row.state.allowed(row.draft_prefix)\n"
        "        kept = True if allowed is None else allowed[slice(None) if law.ids is None else law.ids]\n"
        "        return RowLaw(law.vocab_size, np.where(kept, law.scores, np.float32(-np.inf)), law.ids)",
        "the mask comes after top-k and top-p, which keep what the grammar forbids",
        (f"{OWN}::TestMasks::test_a_law_is_cut_once_it_is_masked",),
    ),
    Mutant(
        DECIDE,
        "        own = says(j, token_id)\n        if own != token_id:",
        "        own = token_id if ready.drafter is None else says(j, token_id)\n        if own != token_id:",
        "forced tokens are committed without being verified, where the mask allows other tokens of the same bytes",
        (f"{OWN}::TestForcedTokens",),
    ),
    Mutant(
        PENALTIES,
        "        return self._columns.after(draft_prefix) if self._columns else None",
        "        return self._columns.after(draft_prefix[len(self.forced()) :]) if self._columns else None",
        "forced tokens do not count for penalties",
        (f"{OWN}::TestWhoWins::test_forced_tokens_count_for_penalties",),
    ),
    Mutant(
        PENALTIES,
        "            banned, vocab_size = frozenset(i for i in banned if allowed[i]), int(allowed.sum())",
        "            pass",
        "a ban wins over the grammar: nothing is left to draw from",
        (f"{OWN}::TestWhoWins",),
    ),
    Mutant(
        COMMITTED,
        "(num_now > params.min_tokens or params.grammar)",
        "num_now > params.min_tokens",
        "an answer that is complete goes on with ends until min_tokens",
        ("tests/unit/test_commit.py",),
    ),
)
