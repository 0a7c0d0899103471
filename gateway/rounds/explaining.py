"""Explains a round, for a request that asks for it: adds the tokens' texts to the target's explanation. Pure.

The explanation goes into the response alone, never into logs, spans or series.
"""

from __future__ import annotations

from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import gateway_pb2
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind
from outrider.wire.requests.drafters import GRAMMAR, Drafter


def kinds_of(verdict: tpb.Verdict) -> list[TokenKind]:
    """Return the kind of each token of a verdict, such as accepted or bonus.

    Accepted tokens have the kind PREDICTED if the request's prediction drafted them, FORCED if a grammar did.
    """
    accepted = TokenKind.ACCEPTED
    if verdict.drafter == Drafter.PREDICTION:
        accepted = TokenKind.PREDICTED
    elif is_forced(verdict):
        accepted = TokenKind.FORCED
    kinds = list[TokenKind]()
    for kind in map(TokenKind, verdict.kinds):
        if kind is TokenKind.ACCEPTED:
            kind = accepted
        kinds.append(kind)
    return kinds


def is_forced(verdict: tpb.Verdict) -> bool:
    """Return whether all verified draft tokens were forced by the grammar."""
    return bool(verdict.num_drafted) and not verdict.drafter


def explain_round(verdict: tpb.Verdict, num_kept: int, tokenizer: Tokenizer) -> gateway_pb2.RoundExplanation:
    """Return the explanation of a verdict: what was verified and rejected, with the text of each token.

    num_kept: number of the verdict's tokens that stay in the output.
    """
    drafter = verdict.drafter
    if is_forced(verdict):
        drafter = GRAMMAR
    explanation = gateway_pb2.RoundExplanation(
        committed_len=verdict.committed_len,
        drafter=drafter,
        batch_size=verdict.batch_size,
        queue_us=verdict.queue_us,
        forward_us=verdict.forward_us,
        accept_us=verdict.accept_us,
        verified=verdict.explanation,
    )
    verified = explanation.verified
    if num_kept < len(verdict.token_ids):  # a stop string comes before the rejected token
        verified.ClearField("rejection")
    tokens: list[pb.DraftToken | pb.RankedToken] = [*verified.draft]
    if verified.HasField("rejection"):
        rejection = verified.rejection
        tokens += [rejection.token, *rejection.target, *rejection.draft_distribution, *rejection.deterministic_tokens]
    for token in tokens:
        token.text = tokenizer.token_text(token.id)
    return explanation
