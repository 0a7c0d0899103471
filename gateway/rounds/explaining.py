"""What a round says of itself where the request asks for it: the target's explanation, with names and texts. Pure.

It goes into the answer alone: neither logs nor spans nor series ever hold any of it.
"""

from __future__ import annotations

from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import gateway_pb2
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind
from outrider.wire.requests.drafters import GRAMMAR, Drafter


def kinds_of(verdict: tpb.Verdict) -> list[TokenKind]:
    """Return a verdict's kinds, those of accepted tokens by what they were drafted from."""
    accepted = TokenKind.ACCEPTED
    if verdict.drafter == Drafter.PREDICTION:
        accepted = TokenKind.PREDICTED
    elif is_forced(verdict):
        accepted = TokenKind.FORCED
    kinds = map(TokenKind, verdict.kinds)
    return [accepted if kind is TokenKind.ACCEPTED else kind for kind in kinds]


def is_forced(verdict: tpb.Verdict) -> bool:
    """Return whether the grammar left no choice of what was verified."""
    return bool(verdict.num_drafted) and not verdict.drafter


def explained(verdict: tpb.Verdict, num_kept: int, tokenizer: Tokenizer) -> gateway_pb2.RoundExplanation:
    """Return what a verdict explains. num_kept: of its tokens, those that stay in the answer."""
    told = gateway_pb2.RoundExplanation(
        committed_len=verdict.committed_len,
        drafter=GRAMMAR if is_forced(verdict) else verdict.drafter,
        batch_size=verdict.batch_size,
        queue_us=verdict.queue_us,
        forward_us=verdict.forward_us,
        accept_us=verdict.accept_us,
        verified=verdict.explanation,
    )
    verified = told.verified
    if num_kept < len(verdict.token_ids):  # a stop string came before
        verified.ClearField("rejection")
    tokens: list[pb.DraftToken | pb.RankedToken] = [*verified.draft]
    if verified.HasField("rejection"):
        rejection = verified.rejection
        tokens += [rejection.token, *rejection.target, *rejection.draft_law, *rejection.draft_guesses]
    for token in tokens:
        token.text = tokenizer.token_text(token.id)
    return told
