"""Counts rounds in the gateway's series."""

from __future__ import annotations

from gateway.generation import OutputTimings, RoundOutput
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TRUNCATE_REASONS
from outrider.wire.metrics import GatewayMetrics, PairMetrics


def note_proposal(metrics: GatewayMetrics, reply: dpb.ProposeReply) -> None:
    metrics.wire_bytes.labels(link="draft_target", encoding=reply.encoding).inc(reply.payload_bytes)


def note_fallback(metrics: GatewayMetrics, why: int) -> None:
    late = why == tpb.FALLBACK_REASON_LATE
    (metrics.proposals_late if late else metrics.proposals_refused).inc()


def note_truncate(metrics: GatewayMetrics, worker: str, reason: pb.TruncateReason) -> None:
    metrics.truncates.labels(worker=worker, reason=TRUNCATE_REASONS[reason]).inc()


def note_round(
    metrics: PairMetrics,
    verdict: tpb.Verdict,
    output: RoundOutput,
    timings: OutputTimings,
    why_plain: str,
    is_tree: bool,
) -> None:
    """Count one round. why_plain: one of PLAIN_REASONS, for a round without drafts.

    Positions are those of a chain. A tree has several drafts at each, of which at most one is kept, so its rounds do
    not count there.
    """
    for token in output.tokens:
        metrics.emitted_tokens.labels(kind=token.kind.name.lower()).inc()
    if not verdict.num_drafted:
        metrics.plain_steps.labels(reason=why_plain).inc()
        return
    metrics.window.add(verdict.num_drafted, verdict.num_accepted)
    metrics.draft_tokens.inc(verdict.num_drafted)
    metrics.accepted_tokens.inc(verdict.num_accepted)
    metrics.rounds.inc()
    metrics.accepted_length.observe(verdict.num_accepted + 1)
    if not is_tree:
        for position in range(verdict.num_drafted):
            metrics.drafted_per_position.labels(position=str(position)).inc()
        for position in range(verdict.num_accepted):
            metrics.accepted_per_position.labels(position=str(position)).inc()
    phases = (
        ("propose", timings.propose_s),
        ("deliver", timings.deliver_s),
        ("verify", timings.verify_s),
        ("overhead", timings.overhead_s),
        ("total", timings.total_s),
    )
    for phase, seconds in phases:
        metrics.round_seconds.labels(phase=phase).observe(seconds)
