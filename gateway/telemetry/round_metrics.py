"""Counts rounds in the gateway's series."""

from __future__ import annotations

from gateway.generation import RoundOutput
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TRUNCATE_REASONS, Drafter, TokenKind
from outrider.wire.metrics import GatewayMetrics, PairMetrics


def note_truncate(metrics: GatewayMetrics, worker: str, reason: pb.TruncateReason) -> None:
    metrics.truncates.labels(worker=worker, reason=TRUNCATE_REASONS[reason]).inc()


def why_plain(verdict: tpb.Verdict, drafter: Drafter | None) -> str:
    """Return which of PLAIN_REASONS a step had that might have had drafts. drafter: who drafts; None = nobody."""
    if verdict.fallback == tpb.FALLBACK_REASON_REFUSED:
        return "refused"
    if drafter is None:
        return "no_draft"
    if verdict.hit and verdict.fallback == tpb.FALLBACK_REASON_UNSPECIFIED:
        return "does_not_pay"
    return "none_parked" if drafter is Drafter.MODEL else "nothing"


def note_lookup(metrics: GatewayMetrics, verdict: tpb.Verdict) -> None:
    """Count what a verdict says of the drafts that were to lie ready for its step."""
    if verdict.HasField("hit"):
        metrics.lookups.labels(result="hit" if verdict.hit else "miss").inc()
    if verdict.HasField("hit") or verdict.wait_us:
        metrics.hold_seconds.observe(verdict.wait_us / 1e6)
    if verdict.fallback == tpb.FALLBACK_REASON_REFUSED:
        metrics.proposals_refused.inc()


def note_drafts(metrics: PairMetrics, num_drafted: int, num_accepted: int) -> None:
    """Count what one source drafted for a round, and what was kept of it."""
    metrics.window.add(num_drafted, num_accepted)
    metrics.draft_tokens.inc(num_drafted)
    metrics.accepted_tokens.inc(num_accepted)


def note_round(metrics: PairMetrics, verdict: tpb.Verdict, output: RoundOutput, reason: str) -> None:
    """Count one round. reason: one of PLAIN_REASONS, for a round without drafts.

    A tree has several drafts at a position, of which at most one is kept: they count as one there.
    """
    searched = [TokenKind(kind) for kind in verdict.kinds] if verdict.levels else []  # a level counts as a token
    for kind in (*searched, *(token.kind for token in output.tokens)):
        metrics.emitted_tokens.labels(kind=kind.name.lower()).inc()
    if not verdict.num_drafted:
        metrics.plain_steps.labels(reason=reason).inc()
        return
    num_drafted, num_accepted = verdict.num_drafted, verdict.num_accepted
    note_drafts(metrics, num_drafted - verdict.num_own_drafted, num_accepted - verdict.num_own_accepted)
    metrics.rounds.inc()
    metrics.accepted_length.observe(verdict.num_accepted + 1)
    for position in range(verdict.depth):
        metrics.drafted_per_position.labels(position=str(position)).inc()
    for position in range(verdict.num_accepted):
        metrics.accepted_per_position.labels(position=str(position)).inc()
    timings = output.timings
    phases = (
        ("deliver", timings.deliver_s),
        ("verify", timings.verify_s),
        ("overhead", timings.overhead_s),
        ("total", timings.total_s),
    )
    for phase, seconds in phases:
        metrics.round_seconds.labels(phase=phase).observe(seconds)
