"""Records each request: one line in the log when it ends and, where it is traced, a span with one below it per round.

Records hold counts and names, never text nor token ids. Code that works for a request finds its record in a context
variable, which tasks begun for it inherit.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from gateway.generation import AnswerUsage
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import OutriderError
from outrider.wire.telemetry.log import about, get_logger, log_fields
from outrider.wire.telemetry.otel_metrics import PROVIDER, ServerMetrics
from outrider.wire.telemetry.trace import OpenSpan, Spans, TraceParent, round_span_id

log = get_logger("gateway.access")

_SANE_ID = re.compile(r"[!-~]{1,128}")
_FALLBACKS = {
    tpb.FALLBACK_REASON_LATE: "late",
    tpb.FALLBACK_REASON_REFUSED: "refused",
    tpb.FALLBACK_REASON_DOES_NOT_PAY: "does_not_pay",
}
_record: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def current_record() -> RequestRecord:
    """Return the record of the request that this task works for; outside of any, one that nobody reads."""
    return _record.get() or RequestRecord("", "")


def note_failure(error: OutriderError) -> None:
    """Note the error that the current request ends in."""
    current_record().outcome = "internal" if type(error) is OutriderError else type(error).__name__


def request_id_of(given: str | None, prefix: str) -> tuple[str, str]:
    """Return the request's id, which is the caller's own where that is sane, and the id of its answer."""
    if given is not None and _SANE_ID.fullmatch(given):
        return given, f"{prefix}-{given}"
    made = f"{prefix}-{uuid.uuid4().hex}"
    return made, made


@dataclass(slots=True)
class RoundRecord:
    """Facts of one round. The id of its span follows from ticket and length, which the target knows, too."""

    ticket: int
    """Of the lease."""
    committed_len: int
    """At which it began."""
    started_s: float
    """Monotonic clock."""
    target: str
    """Name of the member."""
    draft: str | None = None
    """Name of the member that drafts for the answer, or of what drafted in the target itself."""
    verdict: tpb.Verdict | None = None

    @property
    def step_ns(self) -> int:
        """Return how long its step took at the target, which may have begun it before the round before was heard of."""
        verdict = self.verdict or tpb.Verdict()
        return 1000 * (verdict.wait_us + verdict.queue_us + verdict.forward_us + verdict.accept_us)

    def facts(self) -> dict[str, str | int]:
        facts: dict[str, str | int] = {"outrider.target": self.target}
        if self.draft is not None:
            facts["outrider.draft"] = self.draft
        if self.verdict is not None:
            facts |= {
                "outrider.num_drafted": self.verdict.num_drafted,
                "outrider.num_accepted": self.verdict.num_accepted,
                "outrider.num_tokens": len(self.verdict.token_ids),
            }
            if self.verdict.fallback in _FALLBACKS:
                facts["outrider.fallback"] = _FALLBACKS[self.verdict.fallback]
        return facts


@dataclass
class RequestRecord:
    """Facts of one request, filled in by the code that learns them."""

    request_id: str
    operation: str
    """chat, text_completion or generate_content, as OpenTelemetry calls them."""
    place: TraceParent | None = None
    """Where its span stands in the trace; None when it is not traced."""
    outcome: str = "cancelled"
    """ok, internal, or the class of the error; cancelled (the client left) until one of them is known."""
    key: str | None = None
    """Name of the API key."""
    model: str | None = None
    num_prompt_tokens: int = 0
    usages: list[AnswerUsage] = field(default_factory=list)
    """Totals of its answers."""
    targets: set[str] = field(default_factory=set)
    drafts: set[str] = field(default_factory=set)
    """Names of the members that worked for it."""
    spans: Spans | None = None
    """Exporter of its spans; None when the gateway traces nothing."""
    metrics: ServerMetrics | None = None
    """OpenTelemetry's; None when the gateway sends none."""

    @property
    def error(self) -> str | None:
        """Return what went wrong; that a client leaves is no error."""
        return None if self.outcome in ("ok", "cancelled") else self.outcome

    def note_answer(self, first_token_s: float, per_token_s: float | None) -> None:
        """Note what an answer that ended well took. per_token_s: None where it has one token."""
        if self.metrics is not None and self.model is not None:
            self.metrics.note_answer(self.operation, self.model, first_token_s, per_token_s)

    def facts(self) -> dict[str, str | int | None]:
        usages = self.usages
        return {
            "key": self.key,
            "model": self.model,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": sum(usage.num_cached_prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.num_completion_tokens for usage in usages),
            "rounds": sum(usage.num_rounds for usage in usages),
            "plain_steps": sum(usage.num_plain_steps for usage in usages),
            "drafted": sum(usage.num_draft_tokens for usage in usages),
            "accepted": sum(usage.num_accepted_tokens for usage in usages),
            "targets": ",".join(sorted(self.targets)) or None,
            "drafts": ",".join(sorted(self.drafts)) or None,
        }

    @property
    def traceparent(self) -> str:
        """Return the header for the workers' slots, empty when the request is not traced."""
        return "" if self.place is None else str(self.place)

    def add_round(self, ended: RoundRecord) -> None:
        """Add a round that has ended just now, with a verdict or without."""
        self.targets.add(ended.target)
        if ended.draft is not None:
            self.drafts.add(ended.draft)
        if self.place is None or self.spans is None:
            return
        ended_ns = time.time_ns()
        took_ns = max(int(1e9 * (time.monotonic() - ended.started_s)), ended.step_ns)
        error = None if ended.verdict is not None else "no verdict"
        began_ns = ended_ns - took_ns
        span_id = round_span_id(ended.ticket, ended.committed_len)
        self.spans.add("round", self.place, began_ns, ended_ns, ended.facts(), error=error, span_id=span_id)


class RequestRecords:
    """Makes the records of one gateway."""

    def __init__(self, spans: Spans | None = None, metrics: ServerMetrics | None = None) -> None:
        self._spans = spans
        self._metrics = metrics

    @contextmanager
    def record(self, request_id: str, operation: str, header: str | None) -> Iterator[RequestRecord]:
        """Record what is done in this block, and log it at its end. header: the caller's `traceparent`."""
        caller = TraceParent.parse(header)
        started_s, started_ns = time.monotonic(), time.time_ns()
        span = None if self._spans is None else self._spans.begin(operation, caller, started_ns, server=True)
        place = None if span is None else span.place
        record = RequestRecord(request_id, operation, place, spans=self._spans, metrics=self._metrics)
        in_trace = place or caller
        token = _record.set(record)
        try:
            with log_fields(request_id=request_id, trace_id=None if in_trace is None else in_trace.trace_hex):
                try:
                    yield record
                finally:
                    seconds = time.monotonic() - started_s
                    self._log(record, seconds)
                    if self._metrics is not None:
                        self._metrics.note_request(operation, record.model, seconds, record.error)
        finally:
            _record.reset(token)
            if span is not None:
                self._end_span(span, record, started_ns + int(1e9 * seconds))

    def _log(self, record: RequestRecord, seconds: float) -> None:
        facts = record.facts()
        log.info(
            "request %s: %s in %.3f s; key %s, model %s, %d prompt and %d output tokens, %d rounds, "
            "%d of %d drafted tokens accepted",
            record.request_id,
            record.outcome,
            seconds,
            record.key or "-",
            record.model or "-",
            record.num_prompt_tokens,
            facts["completion_tokens"],
            facts["rounds"],
            facts["accepted"],
            facts["drafted"],
            extra=about(operation=record.operation, outcome=record.outcome, seconds=round(seconds, 6), **facts),
        )

    def _end_span(self, span: OpenSpan, record: RequestRecord, end_ns: int) -> None:
        facts = record.facts()
        model = facts.pop("model")
        named = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": facts.pop("prompt_tokens"),
            "gen_ai.usage.output_tokens": facts.pop("completion_tokens"),
            "error.type": record.error,
            "outrider.request_id": record.request_id,
            "outrider.outcome": record.outcome,
            **{f"outrider.{name}": value for name, value in facts.items()},
        }
        known = {name: value for name, value in named.items() if value is not None}
        span.end(end_ns, known, record.error, record.operation if model is None else f"{record.operation} {model}")
