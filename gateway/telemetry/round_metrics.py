"""Counts rounds in the gateway's series."""

from __future__ import annotations

from gateway.generation import RoundOutput
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TRUNCATE_REASONS, TokenKind
from outrider.wire.requests.drafters import Drafter
from outrider.wire.telemetry.metrics import GatewayMetrics, PairMetrics


def note_truncate(metrics: GatewayMetrics, worker: str, reason: pb.TruncateReason) -> None:
    """Count a truncation that was sent. worker: "target" or "draft"."""
    metrics.truncates.labels(worker=worker, reason=TRUNCATE_REASONS[reason]).inc()


def why_plain(verdict: tpb.Verdict, drafter: Drafter | None, *, is_unprofitable: bool, is_busy: bool) -> str:
    """Return which of PLAIN_REASONS explains a step without drafts.

    drafter: drafter of the step; None if there was none. is_unprofitable: whether its draft pauses because drafts did
    not pay. is_busy: whether no draft has a free slot.
    """
    if verdict.fallback == tpb.FALLBACK_REASON_REFUSED:
        return "refused"
    if is_unprofitable or verdict.fallback == tpb.FALLBACK_REASON_DOES_NOT_PAY:
        return "does_not_pay"
    if drafter is None:
        return "busy" if is_busy else "no_draft"
    return "none_parked" if drafter is Drafter.MODEL else "nothing"


def note_lookups(metrics: GatewayMetrics, verdict: tpb.Verdict) -> None:
    """Count, for each draft, whether a verdict's step found its draft tokens."""
    told = [outcome for outcome in verdict.outcomes if outcome.HasField("hit")]
    for outcome in told:
        metrics.lookups.labels(result="hit" if outcome.hit else "miss").inc()
    if told or verdict.wait_us:
        metrics.hold_seconds.observe(verdict.wait_us / 1e6)
    metrics.proposals_refused.inc(sum(outcome.is_refused for outcome in verdict.outcomes))


def note_drafts(metrics: PairMetrics, outcome: tpb.DraftOutcome) -> None:
    """Count the tokens that one drafter proposed for a round, and those accepted."""
    if outcome.num_drafted:
        metrics.window.add(outcome.num_drafted, outcome.num_accepted)
        metrics.draft_tokens.inc(outcome.num_drafted)
        metrics.accepted_tokens.inc(outcome.num_accepted)


def note_round(metrics: PairMetrics, verdict: tpb.Verdict, output: RoundOutput, reason: str) -> None:
    """Count one round, without its draft tokens. reason: one of PLAIN_REASONS, for a round without drafts.

    A tree has several draft tokens at a position, of which at most one is accepted. They count as one there.
    """
    searched = [TokenKind(kind) for kind in verdict.kinds] if verdict.levels else []  # a level counts as a token
    for kind in (*searched, *(token.kind for token in output.tokens)):
        metrics.emitted_tokens.labels(kind=kind.counted.label).inc()
    if not verdict.num_drafted:
        metrics.plain_steps.labels(reason=reason).inc()
        return
    metrics.rounds.inc()
    metrics.accepted_length.observe(len(searched) or len(output.tokens))
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
