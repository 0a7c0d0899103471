"""Checks a target's verdict before it is used. Pure. `Verification` calls it on each verdict."""

from __future__ import annotations

from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import MAX_DRAFT_TOKENS

KINDS = frozenset(kind.value for kind in TokenKind)
"""Values of the enum of token kinds that a verdict may contain."""
DRAFTERS = frozenset(("", *Drafter))
"""Names of drafters that a verdict may contain. "" stands for no drafter, or for the request's grammar."""


def why_invalid(verdict: tpb.Verdict, num_committed: int, num_drafts: int, num_scores: int | None) -> str | None:
    """Return the reason why a verdict is invalid; None if its fields are consistent and safe to use as indices.

    num_committed: number of tokens, or of levels of a beam search, that the verdict commits. num_drafts: number of
    draft workers of the choice. num_scores: number of prompt tokens for which the verdict must hold log-probs; None for
    no check.
    """
    num_outcomes = len(verdict.outcomes)
    num_expected = num_drafts + 1
    if num_outcomes != num_expected:
        return (
            f"its verdict has {num_outcomes} outcomes, must have {num_expected}: one for each draft worker and one "
            "for the target itself"
        )
    if verdict.drafter not in DRAFTERS:
        return f"its verdict names drafter {verdict.drafter[:100]!r}, which is none"
    if len(verdict.kinds) != num_committed or not KINDS.issuperset(verdict.kinds):
        return f"its verdict has kinds {verdict.kinds[:100]}, must have {num_committed}, each of {sorted(KINDS)}"
    if len(verdict.logprobs) not in (0, num_committed):
        return f"its verdict has {len(verdict.logprobs)} logprobs, must have {num_committed} or none"
    if num_scores is not None and len(verdict.prompt_logprobs) != num_scores:
        return f"its verdict has {len(verdict.prompt_logprobs)} prompt_logprobs, must have {num_scores}"
    for entry in (*verdict.logprobs, *verdict.prompt_logprobs):
        if len(entry.top_ids) != len(entry.top_logprobs):
            return (
                f"its verdict has log-probs with {len(entry.top_ids)} top_ids and {len(entry.top_logprobs)} "
                "top_logprobs, must have as many of both"
            )
    for name, value in (("depth", verdict.depth), ("num_accepted", verdict.num_accepted)):
        if value > MAX_DRAFT_TOKENS:
            return f"its verdict has {name} {value}, must be at most {MAX_DRAFT_TOKENS}"
    return None
