"""A request's grammar: masks, who wins, and what it forces."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import argument, call, comparison, drop, never, statement

SAMPLING = "outrider.engine.sampling"
OWN = "tests/unit/outrider/engine/sampling/test_grammar_state.py"

GRAMMAR: Faults = {
    (f"{OWN}::TestMasks",): {
        "the mask does not go on along the drafts: what follows them breaks the grammar": Fault(
            f"{SAMPLING}:GrammarState.allowed", argument("_masked", 0, to="()")
        ),
        "tokens that were taken back still count for the grammar": Fault(
            f"{SAMPLING}:GrammarState.set_output", comparison("!=", to="False")
        ),
    },
    (f"{OWN}::TestWhatCannotBeFollowed",): {
        "what other requests met ends all that come later": Fault(f"{SAMPLING}:Grammar.retire", drop("forget"))
    },
    (
        "tests/unit/outrider/engine/speculation/test_growing_tree.py::TestExactLaw::test_distributions_that_a_grammar_masks",
    ): {
        "a draft draws what the grammar forbids, and ships its law as masked: the mask is on the target alone": Fault(
            "outrider.engine.speculation:_draw", call("copy", to="np.maximum(_self, 0.1)")
        )
    },
    (f"{OWN}::TestMasks::test_a_distribution_is_cut_once_it_is_masked",): {
        "the mask comes after top-k and top-p, which keep what the grammar forbids": Fault(
            f"{SAMPLING}:HostLogits.distribution",
            statement(
                "distribution_of",
                to="law = distribution_of(self._rows[index], row.state.params)\n"
                "allowed = row.state.allowed(row.draft_prefix)\n"
                "kept = True if allowed is None else allowed[slice(None) if law.ids is None else law.ids]\n"
                "return TokenDistribution(law.vocab_size, np.where(kept, law.scores, np.float32(-np.inf)), law.ids)",
            ),
        )
    },
    (f"{OWN}::TestForcedTokens",): {
        "forced tokens are committed unverified where the mask allows other tokens of the same bytes": Fault(
            "target_service:_decide_slot",
            call(
                "walk",
                "greedy",
                to="_f(_0, _1 if any(slot_drafter.drafter for slot_drafter in proposal.slot_drafters) else"
                " lambda node: _0.ids[_0.children(node)[0]] if _0.children(node) else _1(node))",
            ),
        )
    },
    (f"{OWN}::TestWhoWins::test_forced_tokens_count_for_penalties",): {
        "forced tokens do not count for penalties": Fault(
            f"{SAMPLING}:SamplingState.edits", argument("after", 0, to="_[len(self.forced()) :]")
        )
    },
    (f"{OWN}::TestWhoWins",): {
        "a ban wins over the grammar: nothing is left to draw from": Fault(
            f"{SAMPLING}:SamplingState.banned", drop("sum")
        )
    },
    ("tests/unit/target_service/step/test_commit.py",): {
        "an answer that is complete goes on with ends until min_tokens": Fault(
            "target_service:commit_tokens", never("grammar")
        )
    },
}
