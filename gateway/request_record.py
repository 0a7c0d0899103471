"""What is told of a request when it has ended: one line in the log and, where it is traced, a span with one below it
for each round. Counts and names only: never text, never ids of tokens.

Whoever works for the request finds its record by `current_record`; tasks that are begun for it inherit it.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from gateway.generation import GenerationRequest, Usage
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import OutriderError
from outrider.wire.log import about, get_logger, log_fields
from outrider.wire.trace import OpenSpan, Spans, TraceParent

log = get_logger("gateway.access")

_SANE_ID = re.compile(r"[!-~]{1,128}")
_FALLBACKS = {tpb.FALLBACK_REASON_LATE: "late", tpb.FALLBACK_REASON_REFUSED: "refused"}
_record: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def current_record() -> RequestRecord | None:
    """Of the request that this task works for; None outside of any."""
    return _record.get()


def note_key(name: str | None) -> None:
    """Of the API key that the current request came with."""
    record = _record.get()
    if record is not None:
        record.key = name


def note_admitted(requests: Sequence[GenerationRequest]) -> None:
    """The current request asks for these answers."""
    record = _record.get()
    if record is not None:
        record.model = requests[0].model
        record.num_prompt_tokens = sum(len(each.prompt_ids) for each in requests if each.params.choice == 0)


def note_answer(usage: Usage) -> None:
    """An answer of the current request begins. `usage` is counted on by its session."""
    record = _record.get()
    if record is not None:
        record.usages.append(usage)


def tell_round(told: Round | None) -> None:
    """A round of the current request has ended; None if it had not begun."""
    record = _record.get()
    if record is not None and told is not None:
        record.add_round(told)


def note_ok() -> None:
    """The current request got all it asked for."""
    record = _record.get()
    if record is not None:
        record.outcome = "ok"


def note_failure(error: OutriderError) -> None:
    """What the current request is told instead."""
    record = _record.get()
    if record is not None:
        record.outcome = "internal" if type(error) is OutriderError else type(error).__name__


def traceparent() -> str:
    """For the workers' slots; empty when the current request is not traced."""
    record = _record.get()
    return "" if record is None or record.place is None else str(record.place)


def request_id_of(told: str | None, prefix: str) -> tuple[str, str]:
    """The request's id, which is the caller's own where that is sane, and the id of its answer."""
    if told is not None and _SANE_ID.fullmatch(told):
        return told, f"{prefix}-{told}"
    made = f"{prefix}-{uuid.uuid4().hex}"
    return made, made


@dataclass(slots=True)
class Round:
    """What is told of a round. The id of its span is the ticket, which the workers know, too."""

    ticket: int
    started_s: float
    """Monotonic."""
    target: str
    """Name of the member."""
    num_draft_tokens: int = 0
    draft: str | None = None
    """Of the member that was asked for drafts."""
    verdict: tpb.Verdict | None = None

    def facts(self) -> dict[str, str | int]:
        facts: dict[str, str | int] = {
            "outrider.target": self.target,
            "outrider.num_draft_tokens": self.num_draft_tokens,
        }
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
    """Filled in by whoever knows."""

    request_id: str
    operation: str
    """chat, text_completion or generate_content, as OpenTelemetry calls them."""
    place: TraceParent | None = None
    """Of its span; None when it is not traced."""
    outcome: str = "cancelled"
    """ok, internal, or the class of the error; until one of them is known, the client has left."""
    key: str | None = None
    """Name of the API key."""
    model: str | None = None
    num_prompt_tokens: int = 0
    usages: list[Usage] = field(default_factory=list)
    """Of its answers."""
    targets: set[str] = field(default_factory=set)
    drafts: set[str] = field(default_factory=set)
    """Names of the members that made rounds for it."""
    spans: Spans | None = None
    """Where they go, if anywhere."""

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

    def add_round(self, told: Round) -> None:
        """It has ended just now, with a verdict or without."""
        self.targets.add(told.target)
        if told.draft is not None:
            self.drafts.add(told.draft)
        if self.place is None or self.spans is None:
            return
        ended_ns = time.time_ns()
        took_ns = int(1e9 * (time.monotonic() - told.started_s))
        error = None if told.verdict is not None else "no verdict"
        began_ns = ended_ns - took_ns
        self.spans.add("round", self.place, began_ns, ended_ns, told.facts(), error=error, span_id=told.ticket)


class RequestRecords:
    """One per gateway."""

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans

    @contextmanager
    def record(self, request_id: str, operation: str, header: str | None) -> Iterator[RequestRecord]:
        """The record of what is done in this block, told at its end. header: the caller's `traceparent`."""
        caller = TraceParent.parse(header)
        started_s, started_ns = time.monotonic(), time.time_ns()
        span = None if self._spans is None else self._spans.begin("request", caller, started_ns, server=True)
        place = None if span is None else span.place
        record = RequestRecord(request_id, operation, place, spans=self._spans)
        in_trace = place or caller
        token = _record.set(record)
        try:
            with log_fields(request_id=request_id, trace_id=None if in_trace is None else in_trace.trace_hex):
                try:
                    yield record
                finally:
                    seconds = time.monotonic() - started_s
                    self._log(record, seconds)
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
        named = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.request.model": facts.pop("model"),
            "gen_ai.usage.input_tokens": facts.pop("prompt_tokens"),
            "gen_ai.usage.output_tokens": facts.pop("completion_tokens"),
            "outrider.request_id": record.request_id,
            "outrider.outcome": record.outcome,
            **{f"outrider.{name}": value for name, value in facts.items()},
        }
        known = {name: value for name, value in named.items() if value is not None}
        span.end(end_ns, known, None if record.outcome in ("ok", "cancelled") else record.outcome)
