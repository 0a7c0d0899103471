"""A served pair: the links to its two workers, what is known of them, and the metrics of what they do."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass

from gateway.generation import ModelFacts, RoundOutput, RoundTimings
from gateway.links import WorkerLink
from gateway.room import Room
from gateway.tokenizer import Tokenizer
from gateway.wait_budget import WaitBudget
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.config import GatewayConfig
from outrider.wire.errors import ConfigError, IncompatiblePair
from outrider.wire.fingerprint import first_difference
from outrider.wire.kinds import TRUNCATE_REASONS
from outrider.wire.metrics import GatewayMetrics, PairMetrics


@dataclass(frozen=True)
class TargetFacts:
    """Of the target at start. One that comes back as another model is refused, see `_Connecting`."""

    id: str
    vocab_size: int
    context_limit: int
    created: int


class Pair:
    def __init__(
        self,
        config: GatewayConfig,
        target: WorkerLink,
        draft: WorkerLink | None,
        facts: TargetFacts,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        pair_metrics: PairMetrics,
    ) -> None:
        self.config = config
        self.target = target
        self.draft = draft
        self.facts = facts
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.pair_metrics = pair_metrics
        limits_s = (config.wait_budget_min_ms / 1e3, config.wait_budget_max_ms / 1e3)
        self.wait_budget = WaitBudget(*limits_s)
        self.first_wait_budget = WaitBudget(*limits_s)
        """For proposals that feed a prompt, a slot's first above all: they say nothing about the others."""
        # Random upper half: two gateways, or two lives of one, never make the same ticket.
        self._tickets = itertools.count((int.from_bytes(os.urandom(4), "little") << 32) + 1)
        self.slot_ids = itertools.count(1)
        self.room = Room()

    def new_ticket(self) -> int:
        return next(self._tickets)

    @property
    def draft_context_limit(self) -> int:
        connection = None if self.draft is None else self.draft.connection
        return 0 if connection is None else connection.info.context_limit

    def model_facts(self) -> ModelFacts:
        connection = None if self.draft is None else self.draft.connection
        draft_id = None if connection is None else connection.info.model_id
        facts = self.facts
        return ModelFacts(facts.id, facts.context_limit, facts.vocab_size, facts.created, draft_id)

    # metrics of rounds

    def note_proposal(self, reply: dpb.ProposeReply, took_s: float, fed_prompt: bool) -> None:
        (self.first_wait_budget if fed_prompt else self.wait_budget).observe(took_s)
        self.metrics.wire_bytes.labels(link="draft_target", encoding=reply.encoding).inc(reply.payload_bytes)

    def note_wasted(self, num_tokens: int) -> None:
        self.pair_metrics.wasted_tokens.inc(num_tokens)

    def note_fallback(self, why: int) -> None:
        late = why == tpb.FALLBACK_REASON_LATE
        (self.metrics.proposals_late if late else self.metrics.proposals_refused).inc()

    def note_truncate(self, worker: str, reason: pb.TruncateReason) -> None:
        self.metrics.truncates.labels(worker=worker, reason=TRUNCATE_REASONS[reason]).inc()

    def note_round(self, verdict: tpb.Verdict, output: RoundOutput, timings: RoundTimings, why_plain: str) -> None:
        """`why_plain`: one of PLAIN_REASONS, for a round without drafts."""
        metrics = self.pair_metrics
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


async def connect_pair(config: GatewayConfig) -> Pair:
    """Connect to both workers and compare them.

    Raises Unavailable when one does not answer in time, IncompatiblePair naming the first difference.
    """
    return await _Connecting(config).run()


class _Connecting:
    """The start-up handshake."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._target_info: pb.WorkerInfo | None = None
        self._metrics: GatewayMetrics | None = None
        self._template: str | None = None

    async def run(self) -> Pair:
        config = self._config
        self._template = _read_template(config)
        links: list[WorkerLink] = []
        try:
            if config.target is None:
                raise ConfigError("registry is not served yet: give --target HOST:PORT", param="registry")
            target = self._link("target", config.target)
            links.append(target)
            draft = None
            if config.draft is not None:
                draft = self._link("draft", config.draft)
                links.append(draft)
            return await self._compare(target, draft)
        except BaseException:
            for link in links:
                await link.close()
            raise

    def _link(self, name: str, address: str) -> WorkerLink:
        def count(num_bytes: int) -> None:
            if self._metrics is not None:
                self._metrics.wire_bytes.labels(link=f"gateway_{name}", encoding="control").inc(num_bytes)

        def changed(connected: bool) -> None:
            if self._metrics is not None:
                self._metrics.worker_connected.labels(worker=name).set(connected)

        return WorkerLink(
            name,
            address,
            max_message_bytes=self._config.max_message_bytes,
            silence_s=self._config.round_timeout_s,
            accept=lambda info: self._accept(name, info),
            count_bytes=count,
            on_change=changed,
        )

    def _accept(self, name: str, info: pb.WorkerInfo) -> None:
        """Later lives must fit the target seen at start; the first are compared in full by `_compare`."""
        first = self._target_info
        if first is None:
            return
        if info.vocab_size != first.vocab_size or info.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise IncompatiblePair(
                f"the {name} {info.model_id} has vocabulary {info.vocab_size} {info.tokenizer_fingerprint[:12]}, "
                f"the pair was started with {first.vocab_size} {first.tokenizer_fingerprint[:12]}"
            )
        if name == "target" and _identity(info) != _identity(first):
            raise IncompatiblePair(
                f"the target came back as {_identity(info)}, the pair was started with {_identity(first)}; "
                "restart the gateway to serve another model"
            )
        if name == "target" and info.context_limit < first.context_limit:
            raise IncompatiblePair(
                f"the target's context limit fell from {first.context_limit} to {info.context_limit}"
            )

    async def _compare(self, target: WorkerLink, draft: WorkerLink | None) -> Pair:
        config = self._config
        info = (await target.wait_connected(config.start_timeout_s)).info
        files = await target.get_tokenizer()
        draft_id = ""
        if draft is not None:
            draft_info = (await draft.wait_connected(config.start_timeout_s)).info
            draft_id = draft_info.model_id
            await _check_vocabularies(info, draft_info, files, draft)
        self._target_info = info
        metrics = self._metrics = GatewayMetrics()
        pair_metrics = metrics.pair(info.model_id, draft_id)
        for link in (target, draft):
            if link is not None:
                metrics.worker_connected.labels(worker=link.name).set(link.connection is not None)
        name = config.model_name or info.model_id
        facts = TargetFacts(name, info.vocab_size, info.context_limit, int(time.time()))
        tokenizer = Tokenizer.from_files(files, self._template)
        return Pair(config, target, draft, facts, tokenizer, metrics, pair_metrics)


def _identity(info: pb.WorkerInfo) -> str:
    """What must not change under a request that goes on after a restart."""
    return f"{info.model_id} in {info.dtype} ending at {list(info.eos_token_ids)}"


async def _check_vocabularies(
    target: pb.WorkerInfo, draft: pb.WorkerInfo, target_files: pb.TokenizerFiles, draft_link: WorkerLink
) -> None:
    pair = f"draft {draft.model_id} does not fit target {target.model_id}"
    if target.tokenizer_fingerprint != draft.tokenizer_fingerprint:
        draft_files = await draft_link.get_tokenizer()
        difference = first_difference(target_files.tokenizer_json, draft_files.tokenizer_json)
        raise IncompatiblePair(f"{pair}: {difference or 'their tokenizers differ'}; use two models of one tokenizer")
    if target.vocab_size != draft.vocab_size:
        raise IncompatiblePair(
            f"{pair}: logits have {target.vocab_size} entries in the target and {draft.vocab_size} in the draft; "
            "use two models of one vocabulary size"
        )


def _read_template(config: GatewayConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        with open(config.chat_template, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template is {config.chat_template!r}, which cannot be read: {error}", param="chat_template"
        ) from None
