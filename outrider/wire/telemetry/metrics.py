"""All Prometheus series. The docstring below a series has a PromQL expression that reads it, and what the result means.

Acceptance rate = accepted / drafted tokens; bonus tokens do not count in either. Mean accepted length = 1 + accepted /
rounds. `spec_acceptance_rate`, the rate over the last minute per pair of models, is computed when it is scraped.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.wire.kinds import TokenKind
from outrider.wire.telemetry.log import num_dropped_lines

WINDOW_S = 60
"""Number of past seconds over which `spec_acceptance_rate` is computed."""


class RecentAcceptance:
    """Acceptance rate of one pair of models over the last 60 s, to the second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[list[int]] = deque()
        """[second, drafted, accepted], oldest first."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count a round that verified `num_drafted` draft tokens and accepted `num_accepted` of them."""
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._forget(now)
            self._seconds.append([now, 0, 0])
        self._seconds[-1][1] += num_drafted
        self._seconds[-1][2] += num_accepted

    def rate(self) -> float:
        """Return the number of accepted draft tokens divided by the number of verified ones, both over the last 60 s.
        It is NaN if no draft token was verified in that time.
        """
        self._forget(int(self._clock()))
        num_drafted = 0
        num_accepted = 0
        for _, drafted, accepted in self._seconds:
            num_drafted += drafted
            num_accepted += accepted
        if not num_drafted:
            return math.nan
        return num_accepted / num_drafted

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] < now - WINDOW_S:
            self._seconds.popleft()


class AcceptanceRates(Collector):
    """Prometheus collector of the gauge `spec_acceptance_rate`, which has one value for each pair of models."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str], RecentAcceptance] = {}
        """By (target, draft)."""

    def of(self, target: str, draft: str) -> RecentAcceptance:
        """Return the RecentAcceptance of a pair of models, given their names. It is created if there is none."""
        return self._recent.setdefault((target, draft), RecentAcceptance())

    def forget(self, target: str, draft: str) -> None:
        """Remove the RecentAcceptance of a pair of models that is no longer served."""
        self._recent.pop((target, draft), None)

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "spec_acceptance_rate",
            "Draft tokens accepted over draft tokens verified in the last 60 s; the bonus token is in neither. "
            "NaN when nothing was drafted in that time.",
            labels=["target", "draft"],
        )
        for pair, recent in list(self._recent.items()):
            family.add_metric(pair, recent.rate())
        yield family


class DroppedLogLines(Collector):
    """Prometheus collector of the counter `outrider_log_lines_dropped_total`: lines of this process's log that were
    dropped instead of written.

    increase(outrider_log_lines_dropped_total[5m]) > 0 means that the process that reads the log is too slow, or that
    the disk is full.
    """

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "outrider_log_lines_dropped",
            "Lines of this process's log that could not be written in time and were dropped.",
            num_dropped_lines(),
        )


_PAIR = ("target", "draft")
"""Labels of the series on rounds: names of the target's and the draft's model. Without a draft its label is empty."""

PLAIN_REASONS = ("off", "end", "no_draft", "busy", "none_parked", "nothing", "does_not_pay", "refused")
"""Values of the label `reason`, which says why a step verified no draft tokens of a slot:

off = the request or the gateway turned drafting off. end = the output would end before a draft token could be accepted.
no_draft = no draft worker is connected. busy = no draft worker has a free slot. none_parked = the slot's draft buffer
was empty. nothing = the target's own drafters had nothing to propose. does_not_pay = verifying draft tokens, or waiting
for them, would have taken longer than they save, or the draft worker drafts nothing until its next trial for that
reason. refused = the delivered draft tokens broke a rule of the protocol."""

FEATURE_FATES = ("sent", "dropped", "received")
"""Values of the label `fate` of features: sent = sent by the target, dropped = dropped by the target because the draft
worker reads too slowly, received = received by a draft worker."""

SECONDS_BUCKETS = tuple(0.0005 * 2**power for power in range(22))
"""Upper bounds, in seconds, of the buckets of every histogram of times. The last, 1049 s, is above the default of
`request_timeout_s` (600 s), because the time to the first token includes the queue."""


class GatewayMetrics:
    """Prometheus series of the gateway. The method `pair` returns the series on the rounds of one pair of models, the
    method `answers` the series on the choices of one served model.
    """

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=r)
        r.register(DroppedLogLines())
        self._pairs: dict[tuple[str, str], PairMetrics] = {}
        # Sums over pairs whose series were removed, by series and labels, of which the draft's name is emptied.
        self._removed: defaultdict[tuple[Counter, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self.rates = AcceptanceRates()
        """Gauge: acceptance rate of each pair of models over the last 60 s. That of another span of time is
        rate(spec_accepted_tokens_total[5m]) / rate(spec_draft_tokens_total[5m])."""
        r.register(self.rates)
        self.draft_tokens = Counter("spec_draft_tokens", "Draft tokens given to a verify.", _PAIR, registry=r)
        """Counter of the draft tokens that were verified. rate(spec_draft_tokens_total[5m]) is their number per
        second."""
        self.accepted_tokens = Counter("spec_accepted_tokens", "Draft tokens accepted by a verdict.", _PAIR, registry=r)
        """Counter of the draft tokens that were accepted, including those after the end of an output. 1 +
        rate(spec_accepted_tokens_total[5m]) / rate(spec_rounds_total[5m]) is the mean accepted length."""
        self.rounds = Counter("spec_rounds", "Verifies with at least one draft token.", _PAIR, registry=r)
        """Counter of rounds with draft tokens: one for each step and slot of which the step verified at least one draft
        token. rate(spec_rounds_total[5m]) is their number per second."""
        self.wasted_tokens = Counter(
            "spec_wasted_tokens", "Draft tokens that were right and came after their step.", _PAIR, registry=r
        )
        """Counter of the draft tokens that equal the committed tokens but came too late to be verified.
        rate(spec_wasted_tokens_total[5m]) / rate(spec_draft_tokens_total[5m]) is their number per verified draft
        token."""
        self.truncates = Counter("spec_truncate", "Truncate RPCs sent.", ["worker", "reason"], registry=r)
        """Counter of the Truncate RPCs that the gateway has sent, by worker ("target" or "draft") and by reason. sum by
        (worker, reason) (rate(spec_truncate_total[5m])) is their number per second."""
        self.emitted_tokens = Counter("spec_emitted_tokens", "Tokens committed, by kind.", [*_PAIR, "kind"], registry=r)
        """Counter of the committed output tokens, by kind: accepted, recovered, bonus or plain. sum by (kind)
        (rate(spec_emitted_tokens_total[5m])) is their number per second."""
        self.plain_steps = Counter("spec_plain_steps", "Steps without drafts, by why.", [*_PAIR, "reason"], registry=r)
        """Counter of rounds without draft tokens, one for each step and slot, by reason (see PLAIN_REASONS).
        sum(rate(spec_emitted_tokens_total[5m])) / (sum(rate(spec_rounds_total[5m])) +
        sum(rate(spec_plain_steps_total[5m]))) is the number of output tokens per choice and step of the target."""
        self.drafted_per_position = Counter(
            "spec_drafted_per_position",
            "Draft tokens verified, by position; a tree's count as one at each.",
            [*_PAIR, "position"],
            registry=r,
        )
        """Counter of verified draft tokens by position in the round, from 0. All nodes of a tree at one depth count as
        one token. rate(spec_accepted_per_position_total{position="0"}[5m]) /
        rate(spec_drafted_per_position_total{position="0"}[5m]) is the fraction of those at position 0 that was
        accepted; at a later position n, the fraction that was accepted together with all tokens before n."""
        self.accepted_per_position = Counter(
            "spec_accepted_per_position", "Draft tokens accepted, by position.", [*_PAIR, "position"], registry=r
        )
        """Counter of accepted draft tokens by position in the round, from 0. Divided by drafted_per_position it is the
        fraction at a position that was accepted together with all tokens before."""
        self.wire_bytes = Counter("spec_wire_bytes", "Bytes on a link.", ["link", "encoding"], registry=r)
        """Counter of the bytes on Control streams between gateway and workers, by link ("gateway_target" or
        "gateway_draft") and encoding (always "control"). sum by (link, encoding) (rate(spec_wire_bytes_total[5m])) is
        their number per second."""
        self.round_seconds = Histogram(
            "spec_round_seconds",
            "From verdict to verdict, where there were drafts, by phase: deliver (the step was held back for them), "
            "verify (queue, forward and acceptance in the target), overhead (the rest), total.",
            [*_PAIR, "phase"],
            buckets=SECONDS_BUCKETS,
            registry=r,
        )
        """Histogram of the seconds from one verdict to the next in rounds with draft tokens, by phase: deliver = the
        step was held for draft tokens; verify = queue, forward and decision in the target; overhead = the rest; total =
        all of it. sum by (phase) (rate(spec_round_seconds_sum[5m])) / ignoring (phase) group_left ()
        sum(rate(spec_round_seconds_count{phase="total"}[5m])) is the mean time of each phase."""
        self.accepted_length = Histogram(
            "spec_accepted_length",
            "Tokens that a speculative round gave its answer.",
            _PAIR,
            buckets=(*range(1, 18), 33, 65),
            registry=r,
        )
        """Histogram of the number of output tokens of a round with draft tokens. histogram_quantile(0.5,
        rate(spec_accepted_length_bucket[5m])) is its median."""
        self.lookups = Counter(
            "spec_lookup", "Steps that were to have drafts, by whether some lay ready for them.", ["result"], registry=r
        )
        """Counter of the times that a slot became ready for a step, per draft worker, by result: "hit" = draft tokens
        of that draft worker were in the draft buffer, "miss" = none were. A draft worker that has delivered nothing to
        the slot yet does not count. sum(rate(spec_lookup_total{result="hit"}[5m])) / sum(rate(spec_lookup_total[5m]))
        is the fraction of hits."""
        for result in ("hit", "miss"):
            self.lookups.labels(result=result)
        self.hold_seconds = Histogram(
            "spec_hold_seconds", "Time that a step was held back for drafts.", buckets=SECONDS_BUCKETS, registry=r
        )
        """Histogram of the seconds for which a step was held, waiting for draft tokens. rate(spec_hold_seconds_sum[5m])
        / rate(spec_hold_seconds_count[5m]) is the mean."""
        self.overrun_tokens = Counter(
            "spec_overrun_tokens", "Tokens made behind the end of an answer, whatever ended it.", registry=r
        )
        """Counter of the tokens that a target made after the end of an output. rate(spec_overrun_tokens_total[5m]) /
        sum(rate(spec_emitted_tokens_total[5m])) is their number per committed token."""
        self.proposals_refused = Counter(
            "spec_proposals_refused", "Steps for which drafts came that broke a rule.", registry=r
        )
        """Counter of the steps of a slot for which a delivery broke a rule of the protocol. A step counts once for each
        draft worker that sent such a delivery. rate(spec_proposals_refused_total[5m]) is their number per second."""
        self.requests = Counter("outrider_requests", "Answers ended, by outcome.", ["outcome"], registry=r)
        """Counter of choices that ended, by outcome. sum by (outcome) (rate(outrider_requests_total[5m])) is their
        number per second."""
        self.prompt_tokens = Counter("outrider_prompt_tokens", "Prompt tokens admitted.", ["model"], registry=r)
        """Counter of the prompt tokens of admitted requests. sum(rate(outrider_prompt_tokens_total[5m])) is their
        number per second."""
        self.cached_prompt_tokens = Counter(
            "outrider_cached_prompt_tokens",
            "Of these, tokens that the target had in its prefix cache.",
            ["model"],
            registry=r,
        )
        """Counter of the prompt tokens that a target found in its prefix cache.
        rate(outrider_cached_prompt_tokens_total[5m]) / rate(outrider_prompt_tokens_total[5m]) is their fraction."""
        self.time_to_first_token = Histogram(
            "outrider_time_to_first_token_seconds",
            "Admission to first token.",
            ["model"],
            buckets=SECONDS_BUCKETS,
            registry=r,
        )
        """Histogram of the seconds from admission to the first token. histogram_quantile(0.95, sum by (le)
        (rate(outrider_time_to_first_token_seconds_bucket[5m]))) is the 95th percentile."""
        self.inter_token = Histogram(
            "outrider_inter_token_seconds",
            "A round's time over its tokens.",
            ["model"],
            buckets=SECONDS_BUCKETS,
            registry=r,
        )
        """Histogram of the seconds of a round divided by the number of its output tokens. histogram_quantile(0.95, sum
        by (le) (rate(outrider_inter_token_seconds_bucket[5m]))) is the 95th percentile."""
        self.queue_depth = Gauge("outrider_queue_depth", "Answers waiting for a place.", registry=r)
        """Gauge outrider_queue_depth: number of choices that wait in the queue now."""
        self.running = Gauge("outrider_running", "Answers being decoded.", registry=r)
        """Gauge outrider_running: number of choices that are being decoded now."""
        self.registry_connected = Gauge(
            "outrider_registry_connected", "1 while the launcher's registry is joined.", ["registry"], registry=r
        )
        """Gauge outrider_registry_connected: 1 while the launcher's registry replies. 0 = it does not, and the gateway
        keeps the list of workers that it got last. A gateway without a registry has no such series."""
        self.retries = Counter("outrider_retries", "Rounds done again, by why.", ["reason"], registry=r)
        """Counter of rounds that were run again, by reason. sum by (reason) (rate(outrider_retries_total[5m])) is their
        number per second.

        lost = the target's stream ended. fault = the target failed. slot = the target did not have the choice's slot.
        behind = the target's slot had fewer committed tokens than the gateway. length = the target's verdict was for
        another number of committed tokens than the gateway has. full, draining = the target refused to open the slot,
        and another target is tried."""

    def answers(self, model: str) -> ChoiceMetrics:
        """Return the series on the choices of the served model with id `model`."""
        return ChoiceMetrics(self, model)

    def pair(self, target: str, draft: str) -> PairMetrics:
        """Return the series on the rounds of a pair of models, given the models' names. draft: empty = the rounds that
        have no draft worker.
        """
        key = (target, draft)
        if key not in self._pairs:
            self._pairs[key] = PairMetrics(self, target, draft)
        return self._pairs[key]

    def has_counts(self, target: str, draft: str) -> bool:
        """Return whether any output token or draft token was counted for the pair of models with these names."""
        pair = {"target": target, "draft": draft}
        for series in (self.emitted_tokens, self.draft_tokens, self.wasted_tokens):
            for labels, count in _samples(series):
                if count > 0 and pair.items() <= labels.items():
                    return True
        return False

    def forget_pair(self, target: str, draft: str) -> None:
        """Remove the series of a pair of models that is no longer served. The method `counts` still yields the counts
        of these series.
        """
        pair = {"target": target, "draft": draft}
        counters = (
            self.draft_tokens,
            self.accepted_tokens,
            self.rounds,
            self.wasted_tokens,
            self.emitted_tokens,
            self.plain_steps,
            self.drafted_per_position,
            self.accepted_per_position,
        )
        for series in counters:
            for labels, count in _samples(series):
                if pair.items() <= labels.items():
                    self._removed[series, tuple({**labels, "draft": ""}.items())] += count
            series.remove_by_labels(pair)
        for histogram in (self.round_seconds, self.accepted_length):
            histogram.remove_by_labels(pair)
        self.rates.forget(target, draft)
        self._pairs.pop((target, draft), None)

    def counts(self, series: Counter) -> Iterator[tuple[dict[str, str], float]]:
        """Yield (labels, count) of a counter for each combination of its labels. The counts of pairs that `forget_pair`
        removed are included, with an empty draft name, so that the sum of all counts never decreases.
        """
        yield from _samples(series)
        for (counted, labels), count in self._removed.items():
            if counted is series:
                yield dict(labels), count


def _samples(series: Counter) -> list[tuple[dict[str, str], float]]:
    (family,) = series.collect()
    return [(sample.labels, sample.value) for sample in family.samples if sample.name.endswith("_total")]


class PairMetrics:
    """Series of GatewayMetrics on the rounds of one pair of models: those with the labels target and draft."""

    def __init__(self, metrics: GatewayMetrics, target: str, draft: str) -> None:
        pair = {"target": target, "draft": draft}
        self.recent_acceptance = metrics.rates.of(target, draft)
        self.draft_tokens: Counter = metrics.draft_tokens.labels(**pair)
        self.accepted_tokens: Counter = metrics.accepted_tokens.labels(**pair)
        self.rounds: Counter = metrics.rounds.labels(**pair)
        self.wasted_tokens: Counter = metrics.wasted_tokens.labels(**pair)
        self.accepted_length: Histogram = metrics.accepted_length.labels(**pair)
        self.emitted_tokens = _Bound(metrics.emitted_tokens, pair)
        self.plain_steps = _Bound(metrics.plain_steps, pair)
        # Series exist from the start, at 0: a rate misses the first value of a series.
        for reason in PLAIN_REASONS:
            self.plain_steps.labels(reason=reason)
        for kind in TokenKind:
            self.emitted_tokens.labels(kind=kind.counted.label)
        self.drafted_per_position = _Bound(metrics.drafted_per_position, pair)
        self.accepted_per_position = _Bound(metrics.accepted_per_position, pair)
        self.round_seconds = _Bound(metrics.round_seconds, pair)


class ChoiceMetrics:
    """Series of GatewayMetrics on the choices of one served model: those with the label model."""

    def __init__(self, metrics: GatewayMetrics, model: str) -> None:
        self.prompt_tokens: Counter = metrics.prompt_tokens.labels(model)
        self.cached_prompt_tokens: Counter = metrics.cached_prompt_tokens.labels(model)
        self.time_to_first_token: Histogram = metrics.time_to_first_token.labels(model)
        self.inter_token: Histogram = metrics.inter_token.labels(model)


class WorkerMetrics:
    """Prometheus series of a worker. Those named outrider_worker_... have the label `worker`: "draft" or "target"."""

    def __init__(self, worker: str) -> None:
        r = self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=r)
        r.register(DroppedLogLines())

        def counter(name: str, text: str) -> Counter:
            return Counter(f"outrider_worker_{name}", text, ["worker"], registry=r).labels(worker=worker)

        def counters(name: str, text: str, label: str) -> _Bound[Counter]:
            return _Bound(Counter(f"outrider_worker_{name}", text, ["worker", label], registry=r), {"worker": worker})

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider_worker_{name}", text, ["worker"], registry=r).labels(worker=worker)

        def gauges(name: str, text: str, labels: list[str]) -> _Bound[Gauge]:
            return _Bound(Gauge(f"outrider_worker_{name}", text, ["worker", *labels], registry=r), {"worker": worker})

        self.truncates = counters("truncates", "Truncate RPCs that arrived.", "reason")
        """Counter of the Truncate RPCs that arrived, by reason.
        rate(outrider_worker_truncates_total{worker="draft"}[5m]) is their number per second."""
        self.truncate_freed_blocks = counter("truncate_freed_blocks", "KV blocks freed by Truncate RPCs.")
        """Counter of the KV blocks that Truncate RPCs have freed. rate(outrider_worker_truncate_freed_blocks_total[5m])
        is their number per second."""
        self.info = gauges("info", "1; what the worker is, in its labels.", ["model", "device", "dtype", "path"])
        """Gauge outrider_worker_info, which is always 1. Its labels state the worker's model, device, dtype and
        attention path."""
        self.slots_in_use = gauge("slots_in_use", "Slots open.")
        """Gauge: number of open slots now. outrider_worker_slots_in_use / outrider_worker_slots is the fraction in
        use."""
        self.slots = gauge("slots", "Slots in all.")
        """Gauge outrider_worker_slots: maximum number of open slots of the worker."""
        self.kv_blocks_in_use = gauge("kv_blocks_in_use", "KV blocks held by slots.")
        """Gauge: number of KV blocks that slots hold now. outrider_worker_kv_blocks_in_use / outrider_worker_kv_blocks
        is the fraction in use."""
        self.kv_blocks = gauge("kv_blocks", "KV blocks in all.")
        """Gauge outrider_worker_kv_blocks: number of all KV blocks of the worker, in use or not."""
        self.steps = counters("steps", "Slots stepped, by kind.", "kind")
        """Counter of the slots that a target stepped, by kind ("verify", or "plain" without draft tokens), and of the
        nodes to which a draft worker added children (kind "grow"). sum by (kind)
        (rate(outrider_worker_steps_total[5m])) is their number per second."""
        self.guessed_tokens = counters("guessed_tokens", "Tokens proposed for the draft and fed to it.", "fate")
        """Counter of tokens that the setting `drafted_by` proposes for a draft model, by fate. drawn = the draft model
        drew the token, which saves a row of a later forward; dropped = it did not.
        rate(outrider_worker_guessed_tokens_total{fate="drawn"}[5m]) / ignoring (fate) sum without (fate)
        (rate(outrider_worker_guessed_tokens_total[5m])) is the fraction that was drawn."""
        buckets = (1, 2, 4, 8, 16, 32, 64, 128)
        sizes = Histogram("outrider_worker_batch_size", "Slots in a forward.", ["worker"], buckets=buckets, registry=r)
        self.batch_size: Histogram = sizes.labels(worker=worker)
        """Histogram of the number of slots in a forward. histogram_quantile(0.5,
        rate(outrider_worker_batch_size_bucket[5m])) is the median."""
        self.busy_seconds = counter("busy_seconds", "Time spent in steps.")
        """Counter of the seconds spent in steps. rate(outrider_worker_busy_seconds_total[5m]) is the fraction of the
        time that the worker is busy. Divided by rate(outrider_worker_batch_size_count[5m]), it is the mean seconds of a
        step."""
        self.proposals_refused = counter("proposals_refused", "Proposals refused: values, shape, epoch or length.")
        """Counter of the deliveries that a target has refused. rate(outrider_worker_proposals_refused_total[5m]) is
        their number per second."""
        parked = Counter("spec_parked_tokens", "Delivered draft tokens, by what became of them.", ["fate"], registry=r)
        self.parked_tokens: _Bound[Counter] = _Bound(parked, {})
        """Counter of the draft tokens that were delivered to a target, by fate. sum by (fate)
        (rate(spec_parked_tokens_total[5m])) is their number per second. verified = a step verified them. late = they
        equal the output, but came after the step that decided their positions. pruned = other tokens were committed at
        their positions, or the draft buffer had no parent or no room for them. refused = they broke a rule of the
        protocol. expired = the lease that they were for had ended."""
        self.dropped_tokens = counter("dropped_draft_tokens", "Draft tokens that did not leave.")
        """Counter of the draft tokens that a draft worker dropped because a target reads too slowly.
        rate(outrider_worker_dropped_draft_tokens_total[5m]) is their number per second."""
        self.preemptions = counter("preemptions", "Slots whose KV blocks were taken away for another's need.")
        """Counter of preemptions: slots whose KV blocks were taken for another slot.
        rate(outrider_worker_preemptions_total[5m]) above 0 means that the KV cache is too small for the load."""
        self.slots_waiting = gauge("slots_waiting", "Slots with work that wait for KV blocks.")
        """Gauge outrider_worker_slots_waiting: number of slots that have work but wait for KV blocks now."""
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of slots that were fed for the first time.")
        """Counter of the prompt tokens of slots whose prompt was processed for the first time, including those in the
        prefix cache. rate(outrider_worker_prompt_tokens_total[5m]) is their number per second."""
        self.prefix_hit_tokens = counter("prefix_hit_tokens", "Of these, tokens found in the prefix cache.")
        """Counter of the prompt tokens that were found in the prefix cache.
        rate(outrider_worker_prefix_hit_tokens_total[5m]) / rate(outrider_worker_prompt_tokens_total[5m]) is their
        fraction."""
        self.kv_blocks_cached = gauge("kv_blocks_cached", "KV blocks that no slot holds, kept for later prompts.")
        """Gauge outrider_worker_kv_blocks_cached: number of KV blocks that no slot holds, and that are kept for later
        prompts."""
        self.prefix_evictions = counter("prefix_evictions", "Cached KV blocks given up for new tokens.")
        """Counter of the cached KV blocks that were evicted to make room for new tokens.
        rate(outrider_worker_prefix_evictions_total[5m]) is their number per second."""
        tokens = Histogram(
            "outrider_worker_step_tokens",
            "Tokens in a forward, by what they are for.",
            ["worker", "purpose"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
            registry=r,
        )
        self.step_tokens = _Bound(tokens, {"worker": worker})
        """Histogram of the number of tokens in a forward, by purpose ("prefill" or "decode"). histogram_quantile(0.5,
        rate(outrider_worker_step_tokens_bucket{purpose="prefill"}[5m])) is the median of one purpose."""
        self.wire_bytes = counters("delivered_bytes", "Payload bytes of proposals sent.", "encoding")
        """Counter of the bytes of the deliveries that a draft worker has sent, by encoding. sum by (encoding)
        (rate(outrider_worker_delivered_bytes_total[5m])) is their number per second."""
        names = ["worker", "peer", "fate"]
        text = "of features, by link and by what became of them."
        rows = Counter("outrider_worker_feature_rows", f"Rows {text}", names, registry=r)
        self.feature_rows = _Bound(rows, {"worker": worker})
        """Counter of the features, one per token, on the connection between a target and a draft worker with a head, by
        peer and fate. sum by (peer, fate) (rate(outrider_worker_feature_rows_total[5m])) is their number per second.

        A target counts "sent", and "dropped" if the draft worker reads too slowly; a draft worker counts "received".
        The series of a connection are removed when it is closed."""
        sizes_of_rows = Counter("outrider_worker_feature_bytes", f"Bytes of rows {text}", names, registry=r)
        self.feature_bytes = _Bound(sizes_of_rows, {"worker": worker})
        """Counter of the bytes of features between a target and a draft worker with a head, by peer and fate (sent,
        dropped or received)."""
        self.head_bytes = gauge("head_bytes", "Memory of the projections of heads.")
        """Gauge outrider_worker_head_bytes: bytes of memory that a target uses for the projections of heads."""
        self.kept_feature_bytes = gauge(
            "kept_feature_bytes", "Memory of hidden states kept for drafts that subscribe late."
        )
        """Gauge outrider_worker_kept_feature_bytes: bytes of features that a target keeps for draft workers that may
        ask for them later."""
        agreement = "Share of a text's positions at which a head agreed with its target when they were paired."
        head_agreement = Gauge("outrider_worker_head_agreement", agreement, ["worker", "draft"], registry=r)
        self.head_agreement = _Bound(head_agreement, {"worker": worker})
        """Gauge outrider_worker_head_agreement of a draft worker: fraction of a probe text's positions at which head
        and target had the same most likely token when they were paired."""

    def forget_link(self, peer: str) -> None:
        """Remove the series of the closed connection to `peer`, so that their number does not grow for ever."""
        for fate in FEATURE_FATES:
            for series in (self.feature_rows, self.feature_bytes):
                series.labels(peer=peer, fate=fate)  # `remove` needs it to exist
                series.remove(peer=peer, fate=fate)

    def count_delivered(self, fate: str, num_tokens: int) -> None:
        """Count draft tokens that were delivered to this target. fate: what happened to them, a value of the label
        `fate` of `parked_tokens`.
        """
        if num_tokens:
            self.parked_tokens.labels(fate=fate).inc(num_tokens)


_Series = TypeVar("_Series", Counter, Gauge, Histogram)


class _Bound(Generic[_Series]):
    # A series with some of its labels fixed.

    def __init__(self, series: _Series, fixed: dict[str, str]) -> None:
        self._series: _Series = series
        self._fixed = fixed

    def labels(self, **labels: str) -> _Series:
        bound: _Series = self._series.labels(**self._fixed, **labels)
        return bound

    def remove(self, **labels: str) -> None:
        # Labels in the order in which the series declares them.
        self._series.remove(*self._fixed.values(), *labels.values())
