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
"""Length in seconds of the time window over which `spec_acceptance_rate` is computed."""


class AcceptanceWindow:
    """Acceptance rate of one pair of models over the last 60 s. Tokens are counted per whole second."""

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
        """Return accepted divided by drafted tokens in the last 60 s; NaN = none was drafted."""
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
    """Collector of the series `spec_acceptance_rate`, with one window per pair of models."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], AcceptanceWindow] = {}
        """By (target, draft)."""

    def of(self, target: str, draft: str) -> AcceptanceWindow:
        """Return the window of a pair of models, given their names. It is created if there is none."""
        return self._windows.setdefault((target, draft), AcceptanceWindow())

    def forget(self, target: str, draft: str) -> None:
        """Remove the window of a pair of models that is no longer served."""
        self._windows.pop((target, draft), None)

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "spec_acceptance_rate",
            "Draft tokens accepted over draft tokens verified in the last 60 s; the bonus token is in neither. "
            "NaN when nothing was drafted in that time.",
            labels=["target", "draft"],
        )
        for pair, window in list(self._windows.items()):
            family.add_metric(pair, window.rate())
        yield family


class DroppedLogLines(Collector):
    """Collector of the series `outrider_log_lines_dropped_total`.

    increase(outrider_log_lines_dropped_total[5m]) > 0: lines of the log are missing, because its reader is too slow or
    its disk is full.
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
"""Values of the label `reason`: why a step had no draft tokens. off = the request or the gateway turned drafting off;
end = the output would end before a draft token could be accepted; no_draft = no draft worker is connected; busy = no
draft worker has a free slot; none_parked = no draft tokens were in the draft buffer; nothing = the target's own
drafters had nothing to propose; does_not_pay = verifying draft tokens, or waiting for them, would have taken longer
than they save, or the draft pauses for that reason; refused = the delivered draft tokens broke a rule of the protocol.
"""

FEATURE_FATES = ("sent", "dropped", "received")
"""Values of the label `fate`: what happened to hidden states that a target makes for heads."""

SECONDS_BUCKETS = tuple(0.0005 * 2**power for power in range(22))
"""Upper bounds, in seconds, of the buckets of every histogram of times. The last, 1049 s, is above the default of
`request_timeout_s` (600 s), because the time to the first token includes the queue."""


class GatewayMetrics:
    """Prometheus series of the gateway. `pair` returns the series on the rounds of a pair of models, `answers` those on
    the choices of a model.
    """

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=r)
        r.register(DroppedLogLines())
        self._pairs: dict[tuple[str, str], PairMetrics] = {}
        # Sums over pairs whose series were removed, by series and labels, of which the draft's name is emptied.
        self._removed: defaultdict[tuple[Counter, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self.rates = AcceptanceRates()
        """spec_acceptance_rate: acceptance rate of each pair of models over the last 60 s. Over another time:
        rate(spec_accepted_tokens_total[5m]) / rate(spec_draft_tokens_total[5m])"""
        r.register(self.rates)
        self.draft_tokens = Counter("spec_draft_tokens", "Draft tokens given to a verify.", _PAIR, registry=r)
        """rate(spec_draft_tokens_total[5m]): draft tokens verified per second."""
        self.accepted_tokens = Counter("spec_accepted_tokens", "Draft tokens accepted by a verdict.", _PAIR, registry=r)
        """1 + rate(spec_accepted_tokens_total[5m]) / rate(spec_rounds_total[5m]): mean accepted length, including
        tokens that were accepted after the end of an output."""
        self.rounds = Counter("spec_rounds", "Verifies with at least one draft token.", _PAIR, registry=r)
        """rate(spec_rounds_total[5m]): steps of slots that verified at least one draft token, per second."""
        self.wasted_tokens = Counter(
            "spec_wasted_tokens", "Draft tokens that were right and came after their step.", _PAIR, registry=r
        )
        """rate(spec_wasted_tokens_total[5m]) / rate(spec_draft_tokens_total[5m]): draft tokens that came too late for
        their step but equal the committed tokens, divided by verified ones."""
        self.truncates = Counter("spec_truncate", "Truncate RPCs sent.", ["worker", "reason"], registry=r)
        """sum by (worker, reason) (rate(spec_truncate_total[5m])): Truncate RPCs sent to workers, per second, by
        reason."""
        self.emitted_tokens = Counter("spec_emitted_tokens", "Tokens committed, by kind.", [*_PAIR, "kind"], registry=r)
        """sum by (kind) (rate(spec_emitted_tokens_total[5m])): output tokens committed, per second, by kind."""
        self.plain_steps = Counter("spec_plain_steps", "Steps without drafts, by why.", [*_PAIR, "reason"], registry=r)
        """sum(rate(spec_emitted_tokens_total[5m])) / (sum(rate(spec_rounds_total[5m])) +
        sum(rate(spec_plain_steps_total[5m]))): output tokens per choice and step of the target."""
        self.drafted_per_position = Counter(
            "spec_drafted_per_position",
            "Draft tokens verified, by position; a tree's count as one at each.",
            [*_PAIR, "position"],
            registry=r,
        )
        """Fraction of the draft tokens at a position that were accepted together with all before them:
        rate(spec_accepted_per_position_total{position="0"}[5m]) /
        rate(spec_drafted_per_position_total{position="0"}[5m])"""
        self.accepted_per_position = Counter(
            "spec_accepted_per_position", "Draft tokens accepted, by position.", [*_PAIR, "position"], registry=r
        )
        """Accepted draft tokens by position; see drafted_per_position. Position 0 is the first draft token of a
        round."""
        self.wire_bytes = Counter("spec_wire_bytes", "Bytes on a link.", ["link", "encoding"], registry=r)
        """sum by (link, encoding) (rate(spec_wire_bytes_total[5m])): bytes per second on each link."""
        self.round_seconds = Histogram(
            "spec_round_seconds",
            "From verdict to verdict, where there were drafts, by phase: deliver (the step was held back for them), "
            "verify (queue, forward and acceptance in the target), overhead (the rest), total.",
            [*_PAIR, "phase"],
            buckets=SECONDS_BUCKETS,
            registry=r,
        )
        """sum by (phase) (rate(spec_round_seconds_sum[5m])) / ignoring (phase) group_left ()
        sum(rate(spec_round_seconds_count{phase="total"}[5m])): mean seconds of a round in each phase."""
        self.accepted_length = Histogram(
            "spec_accepted_length",
            "Tokens that a speculative round gave its answer.",
            _PAIR,
            buckets=(*range(1, 18), 33, 65),
            registry=r,
        )
        """histogram_quantile(0.5, rate(spec_accepted_length_bucket[5m])): median number of output tokens of a round."""
        self.lookups = Counter(
            "spec_lookup", "Steps that were to have drafts, by whether some lay ready for them.", ["result"], registry=r
        )
        """sum(rate(spec_lookup_total{result="hit"}[5m])) / sum(rate(spec_lookup_total[5m])): fraction of the steps for
        which draft tokens were buffered. Steps of choices whose draft has delivered nothing yet do not count."""
        for result in ("hit", "miss"):
            self.lookups.labels(result=result)
        self.hold_seconds = Histogram(
            "spec_hold_seconds", "Time that a step was held back for drafts.", buckets=SECONDS_BUCKETS, registry=r
        )
        """rate(spec_hold_seconds_sum[5m]) / rate(spec_hold_seconds_count[5m]): mean seconds for which a step is
        held."""
        self.overrun_tokens = Counter(
            "spec_overrun_tokens", "Tokens made behind the end of an answer, whatever ended it.", registry=r
        )
        """rate(spec_overrun_tokens_total[5m]) / sum(rate(spec_emitted_tokens_total[5m])): tokens made after the end of
        an output, divided by committed ones."""
        self.proposals_refused = Counter(
            "spec_proposals_refused", "Steps for which drafts came that broke a rule.", registry=r
        )
        """rate(spec_proposals_refused_total[5m]): steps whose draft tokens broke a rule of the protocol, per second."""
        self.requests = Counter("outrider_requests", "Answers ended, by outcome.", ["outcome"], registry=r)
        """sum by (outcome) (rate(outrider_requests_total[5m])): choices that ended, per second, by outcome."""
        self.prompt_tokens = Counter("outrider_prompt_tokens", "Prompt tokens admitted.", ["model"], registry=r)
        """sum(rate(outrider_prompt_tokens_total[5m])): prompt tokens of admitted requests, per second."""
        self.cached_prompt_tokens = Counter(
            "outrider_cached_prompt_tokens",
            "Of these, tokens that the target had in its prefix cache.",
            ["model"],
            registry=r,
        )
        """Fraction of the prompt tokens that the target found in its prefix cache:
        rate(outrider_cached_prompt_tokens_total[5m]) / rate(outrider_prompt_tokens_total[5m])"""
        self.time_to_first_token = Histogram(
            "outrider_time_to_first_token_seconds",
            "Admission to first token.",
            ["model"],
            buckets=SECONDS_BUCKETS,
            registry=r,
        )
        """histogram_quantile(0.95, sum by (le) (rate(outrider_time_to_first_token_seconds_bucket[5m]))): seconds from
        admission to the first token, 95th percentile."""
        self.inter_token = Histogram(
            "outrider_inter_token_seconds",
            "A round's time over its tokens.",
            ["model"],
            buckets=SECONDS_BUCKETS,
            registry=r,
        )
        """histogram_quantile(0.95, sum by (le) (rate(outrider_inter_token_seconds_bucket[5m]))): seconds of a round
        divided by its tokens, 95th percentile."""
        self.queue_depth = Gauge("outrider_queue_depth", "Answers waiting for a place.", registry=r)
        """outrider_queue_depth: choices in the queue."""
        self.running = Gauge("outrider_running", "Answers being decoded.", registry=r)
        """outrider_running: choices that are being decoded."""
        self.registry_connected = Gauge(
            "outrider_registry_connected", "1 while the launcher's registry is joined.", ["registry"], registry=r
        )
        """outrider_registry_connected == 0: the launcher does not reply, and the gateway keeps its last list of
        workers. No series without a registry."""
        self.retries = Counter("outrider_retries", "Rounds done again, by why.", ["reason"], registry=r)
        """sum by (reason) (rate(outrider_retries_total[5m])): rounds run again, per second. lost: the target's stream
        ended; fault: the target failed; slot: it had no such slot; behind: its slot had fewer committed tokens; length:
        its verdict was for another length; full, draining: the slot was opened at another target."""

    def answers(self, model: str) -> ChoiceMetrics:
        """Return the series on the choices of the served model with id `model`."""
        return ChoiceMetrics(self, model)

    def pair(self, target: str, draft: str) -> PairMetrics:
        """Return the series on the rounds of a pair of models, given their names. `draft` is empty for rounds without a
        draft worker.
        """
        key = (target, draft)
        if key not in self._pairs:
            self._pairs[key] = PairMetrics(self, target, draft)
        return self._pairs[key]

    def has_counts(self, target: str, draft: str) -> bool:
        """Return whether any round of a pair of models was counted."""
        pair = {"target": target, "draft": draft}
        for series in (self.emitted_tokens, self.draft_tokens, self.wasted_tokens):
            for labels, count in _samples(series):
                if count > 0 and pair.items() <= labels.items():
                    return True
        return False

    def forget_pair(self, target: str, draft: str) -> None:
        """Remove the series of a pair of models that is no longer served. `counts` still includes its counts."""
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
        """Yield (labels, count) of a series for each pair of models. Removed pairs are included, so that the sum never
        decreases.
        """
        yield from _samples(series)
        for (counted, labels), count in self._removed.items():
            if counted is series:
                yield dict(labels), count


def _samples(series: Counter) -> list[tuple[dict[str, str], float]]:
    (family,) = series.collect()
    return [(sample.labels, sample.value) for sample in family.samples if sample.name.endswith("_total")]


class PairMetrics:
    """Those series of GatewayMetrics that have the labels target and draft, bound to one pair of models."""

    def __init__(self, metrics: GatewayMetrics, target: str, draft: str) -> None:
        pair = {"target": target, "draft": draft}
        self.window = metrics.rates.of(target, draft)
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
    """Those series of GatewayMetrics that have the label model, bound to one served model."""

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
        """rate(outrider_worker_truncates_total{worker="draft"}[5m]): Truncate RPCs that arrived, per second."""
        self.truncate_freed_blocks = counter("truncate_freed_blocks", "KV blocks freed by Truncate RPCs.")
        """rate(outrider_worker_truncate_freed_blocks_total[5m]): KV blocks freed by Truncate RPCs, per second."""
        self.info = gauges("info", "1; what the worker is, in its labels.", ["model", "device", "dtype", "path"])
        """outrider_worker_info: the worker's model, device, dtype and attention path, as labels."""
        self.slots_in_use = gauge("slots_in_use", "Slots open.")
        """outrider_worker_slots_in_use / outrider_worker_slots: fraction of the slots in use."""
        self.slots = gauge("slots", "Slots in all.")
        """outrider_worker_slots: number of slots of the worker; see slots_in_use."""
        self.kv_blocks_in_use = gauge("kv_blocks_in_use", "KV blocks held by slots.")
        """outrider_worker_kv_blocks_in_use / outrider_worker_kv_blocks: fraction of the KV cache in use."""
        self.kv_blocks = gauge("kv_blocks", "KV blocks in all.")
        """outrider_worker_kv_blocks: number of KV blocks of the worker; see kv_blocks_in_use."""
        self.steps = counters("steps", "Slots stepped, by kind.", "kind")
        """sum by (kind) (rate(outrider_worker_steps_total[5m])): slots in steps, per second, by kind."""
        self.guessed_tokens = counters("guessed_tokens", "Tokens proposed for the draft and fed to it.", "fate")
        """rate(outrider_worker_guessed_tokens_total{fate="drawn"}[5m]) / ignoring (fate)
        sum without (fate) (rate(outrider_worker_guessed_tokens_total[5m])): fraction of the tokens proposed for the
        draft that it drew, each of which saved a row of a later forward; the others were dropped (draft with
        drafted_by)."""
        buckets = (1, 2, 4, 8, 16, 32, 64, 128)
        sizes = Histogram("outrider_worker_batch_size", "Slots in a forward.", ["worker"], buckets=buckets, registry=r)
        self.batch_size: Histogram = sizes.labels(worker=worker)
        """histogram_quantile(0.5, rate(outrider_worker_batch_size_bucket[5m])): median number of slots in a forward."""
        self.busy_seconds = counter("busy_seconds", "Time spent in steps.")
        """rate(outrider_worker_busy_seconds_total[5m]): fraction of the time spent in steps. Divided by
        rate(outrider_worker_batch_size_count[5m]): mean seconds of a step."""
        self.proposals_refused = counter("proposals_refused", "Proposals refused: values, shape, epoch or length.")
        """rate(outrider_worker_proposals_refused_total[5m]): proposals refused per second (target)."""
        parked = Counter("spec_parked_tokens", "Delivered draft tokens, by what became of them.", ["fate"], registry=r)
        self.parked_tokens: _Bound[Counter] = _Bound(parked, {})
        """sum by (fate) (rate(spec_parked_tokens_total[5m])): delivered draft tokens per second: verified, late
        (equal to the output, but after their step), pruned (other tokens were committed), refused, expired (of no
        lease) (target)."""
        self.dropped_tokens = counter("dropped_draft_tokens", "Draft tokens that did not leave.")
        """rate(outrider_worker_dropped_draft_tokens_total[5m]): draft tokens dropped per second, because a target reads
        too slowly (draft)."""
        self.preemptions = counter("preemptions", "Slots whose KV blocks were taken away for another's need.")
        """rate(outrider_worker_preemptions_total[5m]): above 0, the KV cache is too small for the load."""
        self.slots_waiting = gauge("slots_waiting", "Slots with work that wait for KV blocks.")
        """outrider_worker_slots_waiting: slots that have work but wait for KV blocks."""
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of slots that were fed for the first time.")
        """rate(outrider_worker_prompt_tokens_total[5m]): prompt tokens of slots that were fed for the first time, per
        second; see prefix_hit_tokens."""
        self.prefix_hit_tokens = counter("prefix_hit_tokens", "Of these, tokens found in the prefix cache.")
        """Fraction of prompt tokens found in the prefix cache: rate(outrider_worker_prefix_hit_tokens_total[5m]) /
        rate(outrider_worker_prompt_tokens_total[5m])"""
        self.kv_blocks_cached = gauge("kv_blocks_cached", "KV blocks that no slot holds, kept for later prompts.")
        """outrider_worker_kv_blocks_cached: KV blocks that no slot holds, which are kept for later prompts."""
        self.prefix_evictions = counter("prefix_evictions", "Cached KV blocks given up for new tokens.")
        """rate(outrider_worker_prefix_evictions_total[5m]): cached KV blocks evicted per second for new tokens."""
        tokens = Histogram(
            "outrider_worker_step_tokens",
            "Tokens in a forward, by what they are for.",
            ["worker", "purpose"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
            registry=r,
        )
        self.step_tokens = _Bound(tokens, {"worker": worker})
        """histogram_quantile(0.5, rate(outrider_worker_step_tokens_bucket{purpose="prefill"}[5m])): prefill or decode
        tokens in a forward."""
        self.wire_bytes = counters("delivered_bytes", "Payload bytes of proposals sent.", "encoding")
        """sum by (encoding) (rate(outrider_worker_delivered_bytes_total[5m])): bytes of proposals sent, per second
        (draft)."""
        names = ["worker", "peer", "fate"]
        text = "of features, by link and by what became of them."
        rows = Counter("outrider_worker_feature_rows", f"Rows {text}", names, registry=r)
        self.feature_rows = _Bound(rows, {"worker": worker})
        """sum by (peer, fate) (rate(outrider_worker_feature_rows_total[5m])): positions whose hidden states were sent,
        or dropped because the draft reads too slowly (target); or received (draft). The series of a connection are
        removed when it is closed."""
        sizes_of_rows = Counter("outrider_worker_feature_bytes", f"Bytes of rows {text}", names, registry=r)
        self.feature_bytes = _Bound(sizes_of_rows, {"worker": worker})
        """Bytes of the hidden states that feature_rows counts, per second, by the same labels."""
        self.head_bytes = gauge("head_bytes", "Memory of the projections of heads.")
        """outrider_worker_head_bytes: bytes of memory of the projections of heads (target)."""
        self.kept_feature_bytes = gauge(
            "kept_feature_bytes", "Memory of hidden states kept for drafts that subscribe late."
        )
        """outrider_worker_kept_feature_bytes: bytes of hidden states that are kept for drafts that need them later
        (target)."""
        agreement = "Share of a text's positions at which a head agreed with its target when they were paired."
        head_agreement = Gauge("outrider_worker_head_agreement", agreement, ["worker", "draft"], registry=r)
        self.head_agreement = _Bound(head_agreement, {"worker": worker})
        """outrider_worker_head_agreement (draft): fraction of a text's positions at which the head's most likely token
        was the target's when they were paired. Compare acceptance by position."""

    def forget_link(self, peer: str) -> None:
        """Remove the series of the closed connection to `peer`, so that their number does not grow for ever."""
        for fate in FEATURE_FATES:
            for series in (self.feature_rows, self.feature_bytes):
                series.labels(peer=peer, fate=fate)  # `remove` needs it to exist
                series.remove(peer=peer, fate=fate)

    def count_delivered(self, fate: str, num_tokens: int) -> None:
        """Count draft tokens that were delivered to this target. fate: what happened to them; see `parked_tokens`."""
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
