"""Records each request: one log line at its end and, if it is traced, a span with a child span for each round.

Records hold counts and names, never text or token ids. Code that works for a request finds its record in a context
variable, which the request's tasks inherit.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from gateway.generation import ChoiceUsage
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import OutriderError
from outrider.wire.telemetry.log import get_logger, log_extra, log_fields
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
    """Return the record of the request for which the current task works.

    Outside of a request, return a new record that is used nowhere.
    """
    return _record.get() or RequestRecord("", "")


def note_failure(error: OutriderError) -> None:
    """Record the error with which the current request ends, as the outcome in its record."""
    outcome = type(error).__name__
    if type(error) is OutriderError:  # of no class that clients know: a fault of ours
        outcome = "internal"
    current_record().outcome = outcome


def request_id_of(given: str | None, prefix: str) -> tuple[str, str]:
    """Return the id of a request and the id of its response.

    given: id that the caller sent; if it is None or not valid, a new one is made. prefix: beginning of the response's
    id, as in OpenAI's API.
    """
    if given is not None and _SANE_ID.fullmatch(given):
        return given, f"{prefix}-{given}"
    made = f"{prefix}-{uuid.uuid4().hex}"
    return made, made


@dataclass(slots=True)
class RoundRecord:
    """Record of one round, for its span in a trace.

    The gateway and the target compute the same id of the span from the ticket and the committed length. The target
    makes it the parent of its own span.
    """

    ticket: int
    """Ticket of the lease to which the round belongs."""
    committed_len: int
    """Number of committed tokens at the beginning of the round."""
    started_s: float
    """Monotonic time of the round's beginning, in seconds."""
    target: str
    """Name of the round's target."""
    draft: str | None = None
    """Names of the draft workers that drafted for the round, joined by `&`, or name of the target's own drafter; None
    until it is known."""
    verdict: tpb.Verdict | None = None

    @property
    def step_ns(self) -> int:
        """Duration of the round's step on the target, in nanoseconds. 0 without a verdict.

        It may be longer than the round: a target begins a step before the gateway has the verdict of the previous one.
        """
        verdict = self.verdict or tpb.Verdict()
        return 1000 * (verdict.wait_us + verdict.queue_us + verdict.forward_us + verdict.accept_us)

    def facts(self) -> dict[str, str | int]:
        """Return the attributes of the round's span, by name."""
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
    """Record of one request, for its log line and span. Filled in while the request runs."""

    request_id: str
    operation: str
    """Kind of request in OpenTelemetry's words: chat, text_completion or generate_content."""
    trace_parent: TraceParent | None = None
    """Ids of the trace and of the request's span in it; None if the request is not traced."""
    outcome: str = "cancelled"
    """`ok`, `internal`, or the name of the error's class. Until the end it is `cancelled`, and stays so if the client
    leaves."""
    key: str | None = None
    """Name of the caller's API key; None without one."""
    model: str | None = None
    num_prompt_tokens: int = 0
    usages: list[ChoiceUsage] = field(default_factory=list)
    """Usage of each choice that has begun."""
    targets: set[str] = field(default_factory=set)
    drafts: set[str] = field(default_factory=set)
    """Names of the draft workers (joined by `&`) or own drafters that drafted in the request's rounds; `targets` holds
    the names of the targets."""
    spans: Spans | None = None
    """Exporter of spans; None if the gateway sends no traces."""
    metrics: ServerMetrics | None = None
    """OpenTelemetry metrics; None if the gateway sends none."""

    @property
    def error(self) -> str | None:
        """`outcome` if it is an error, else None. A client that leaves is not an error."""
        if self.outcome in ("ok", "cancelled"):
            return None
        return self.outcome

    def note_answer(self, first_token_s: float, per_token_s: float | None) -> None:
        """Record the latencies of a choice that ended without an error, in seconds.

        first_token_s: time from admission to the first token. per_token_s: mean time per token after the first; None
        for one token.
        """
        if self.metrics is not None and self.model is not None:
            self.metrics.note_answer(self.operation, self.model, first_token_s, per_token_s)

    def facts(self) -> dict[str, str | int | None]:
        """Return the fields of the request's log line and the attributes of its span, by name."""
        total = ChoiceUsage()
        for usage in self.usages:
            total.num_cached_prompt_tokens += usage.num_cached_prompt_tokens
            total.num_completion_tokens += usage.num_completion_tokens
            total.num_rounds += usage.num_rounds
            total.num_plain_steps += usage.num_plain_steps
            total.num_draft_tokens += usage.num_draft_tokens
            total.num_accepted_tokens += usage.num_accepted_tokens
        return {
            "key": self.key,
            "model": self.model,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": total.num_cached_prompt_tokens,
            "completion_tokens": total.num_completion_tokens,
            "rounds": total.num_rounds,
            "plain_steps": total.num_plain_steps,
            "drafted": total.num_draft_tokens,
            "accepted": total.num_accepted_tokens,
            "targets": ",".join(sorted(self.targets)) or None,
            "drafts": ",".join(sorted(self.drafts)) or None,
        }

    @property
    def traceparent(self) -> str:
        """`traceparent` header that the workers get with a slot; empty if the request is not traced."""
        if self.trace_parent is None:
            return ""
        return str(self.trace_parent)

    def add_round(self, ended: RoundRecord) -> None:
        """Add the record of a round that has just ended, with or without a verdict."""
        self.targets.add(ended.target)
        if ended.draft is not None:
            self.drafts.add(ended.draft)
        if self.trace_parent is None or self.spans is None:
            return
        ended_ns = time.time_ns()
        took_ns = max(int(1e9 * (time.monotonic() - ended.started_s)), ended.step_ns)
        began_ns = ended_ns - took_ns
        error: str | None = None
        if ended.verdict is None:
            error = "no verdict"
        span_id = round_span_id(ended.ticket, ended.committed_len)
        self.spans.add("round", self.trace_parent, began_ns, ended_ns, ended.facts(), error=error, span_id=span_id)


class RequestRecords:
    """Creates the records of a gateway's requests, and logs and exports each at its end."""

    def __init__(self, spans: Spans | None = None, metrics: ServerMetrics | None = None) -> None:
        self._spans = spans
        self._metrics = metrics

    @contextmanager
    def record(self, request_id: str, operation: str, header: str | None) -> Iterator[RequestRecord]:
        """Context manager: record a request until the block ends, then log it.

        operation: kind of request in OpenTelemetry's words, such as chat. header: the caller's `traceparent` header;
        None without one.
        """
        caller = TraceParent.parse(header)
        started_s = time.monotonic()
        started_ns = time.time_ns()
        span: OpenSpan | None = None
        if self._spans is not None:
            span = self._spans.begin(operation, caller, started_ns, server=True)
        trace_parent: TraceParent | None = None
        if span is not None:
            trace_parent = span.context
        record = RequestRecord(request_id, operation, trace_parent, spans=self._spans, metrics=self._metrics)
        trace_id: str | None = None
        if (in_trace := trace_parent or caller) is not None:
            trace_id = in_trace.trace_hex
        token = _record.set(record)
        try:
            with log_fields(request_id=request_id, trace_id=trace_id):
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
            extra=log_extra(operation=record.operation, outcome=record.outcome, seconds=round(seconds, 6), **facts),
        )

    def _end_span(self, span: OpenSpan, record: RequestRecord, end_ns: int) -> None:
        facts = record.facts()
        model = facts.pop("model")
        attributes = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": facts.pop("prompt_tokens"),
            "gen_ai.usage.output_tokens": facts.pop("completion_tokens"),
            "error.type": record.error,
            "outrider.request_id": record.request_id,
            "outrider.outcome": record.outcome,
        }
        for name, value in facts.items():
            attributes[f"outrider.{name}"] = value
        known = {name: value for name, value in attributes.items() if value is not None}
        span_name = record.operation
        if model is not None:
            span_name = f"{record.operation} {model}"
        span.end(end_ns, known, record.error, span_name)
