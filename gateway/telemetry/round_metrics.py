"""Counts rounds in the gateway's Prometheus series. The decode loop calls these functions after each round."""

from __future__ import annotations

from gateway.generation import RoundOutput
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TRUNCATE_REASONS, TokenKind
from outrider.wire.telemetry.metrics import GatewayMetrics, PairMetrics


def note_truncate(metrics: GatewayMetrics, worker: str, reason: pb.TruncateReason) -> None:
    """Count a Truncate message that was sent. worker: kind of its receiver, "target" or "draft"."""
    metrics.truncates.labels(worker=worker, reason=TRUNCATE_REASONS[reason]).inc()


def note_lookups(metrics: GatewayMetrics, verdict: tpb.Verdict) -> None:
    """Count for each draft worker whether its draft tokens were there for a verdict's step, and how long the step was
    held.

    Draft workers that have delivered nothing so far are not counted, nor is the target's own drafter.
    """
    has_looked = False
    num_refused = 0
    for outcome in verdict.outcomes:
        num_refused += outcome.is_refused
        if outcome.HasField("has_drafts"):
            has_looked = True
            result = "miss"
            if outcome.has_drafts:
                result = "hit"
            metrics.lookups.labels(result=result).inc()
    if has_looked or verdict.wait_us:
        metrics.hold_seconds.observe(verdict.wait_us / 1e6)
    metrics.proposals_refused.inc(num_refused)


def note_drafts(metrics: PairMetrics, outcome: tpb.DraftOutcome) -> None:
    """Count the draft tokens of one drafter that a round verified, and those that it accepted."""
    if outcome.num_drafted:
        metrics.recent_acceptance.add(outcome.num_drafted, outcome.num_accepted)
        metrics.draft_tokens.inc(outcome.num_drafted)
        metrics.accepted_tokens.inc(outcome.num_accepted)


def note_round(metrics: PairMetrics, verdict: tpb.Verdict, output: RoundOutput, reason: str) -> None:
    """Count one round, its output tokens, and the positions at which draft tokens were verified or accepted.

    `note_drafts` counts the draft tokens. reason: one of PLAIN_REASONS, used for a round without draft tokens.

    Positions count from 0. In a tree, several draft tokens may be at one position, of which at most one is accepted.
    They count as one there.

        # a tree of depth 3 whose first two tokens are accepted: drafted at positions 0, 1, 2; accepted at 0, 1
    """
    kinds = [token.kind for token in output.tokens]
    num_levels = 0
    if verdict.levels:  # of a beam search: a level counts as a token
        kinds = [*map(TokenKind, verdict.kinds), *kinds]
        num_levels = len(verdict.kinds)
    for kind in kinds:
        metrics.emitted_tokens.labels(kind=kind.counted.label).inc()
    if not verdict.num_drafted:
        metrics.plain_steps.labels(reason=reason).inc()
        return
    metrics.rounds.inc()
    metrics.accepted_length.observe(num_levels or len(output.tokens))
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
