"""Exports Outrider's series under vLLM's names, which dashboards, benchmarks and endpoint pickers read.

Most values are those of Outrider's own series, read at each scrape, so that both agree. Other values are measured here.
Sources: vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py of vLLM 0.33. docs/monitoring.md lists the series
whose meaning differs from vLLM's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.generation import ChoiceUsage, FinishReason
from outrider.wire.telemetry.metrics import SECONDS_BUCKETS, GatewayMetrics

LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of the label `engine`, which is always the same. vLLM numbers its engine processes with it; the gateway has one
series for each model, over all targets."""
FAILED = "error"
ABORTED = "abort"
"""FAILED and ABORTED are values of the label `finished_reason`: for choices that ended with an error, and for choices
whose client left."""
_TOKENS = tuple(2**power for power in range(18))


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Current load of a served model, for its gauges."""

    name: str
    """Model id that requests name."""
    target: str
    """Value of the label `target` in the model's series of rounds: name of the target's checkpoint, with `@` and the
    pool's name if two checkpoints have one name."""
    num_running: int
    num_waiting: int
    kv_share: float
    """Fraction of a target's KV blocks in use, 0 to 1: the mean over the model's targets."""
    kv_block_size: int
    num_kv_blocks: int
    """Number of KV blocks of all targets of the model together."""


@dataclass(frozen=True, slots=True)
class ChoiceTimes:
    """Monotonic times of one choice, in seconds."""

    admitted_s: float
    """Monotonic time, in seconds, at which the choice entered the queue."""
    placed_s: float
    """Monotonic time, in seconds, at which the choice left the queue because it got a place."""
    first_s: float
    """Monotonic time, in seconds, at which the choice's first tokens were committed."""
    last_s: float
    """Monotonic time, in seconds, at which the choice's last tokens were committed."""
    num_tokens: int

    @property
    def first_token_s(self) -> float:
        """Seconds from the choice's entry into the queue until its first tokens were committed."""
        return self.first_s - self.admitted_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time per token after the first, in seconds; None for fewer than two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


class ChoiceSeries:
    """Prometheus series of the durations and finish reasons of choices, under vLLM's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", text, LABELS, buckets=SECONDS_BUCKETS, registry=registry)

        def tokens(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, buckets=_TOKENS, registry=registry)

        self._between_outputs = seconds("inter_token_latency", "From one round of an answer to its next.")
        self._per_token = seconds("request_time_per_output_token", "decode_time over the tokens after the first.")
        self._whole = seconds("e2e_request_latency", "Admission to the last token.")
        self._queue = seconds("request_queue_time", "Waiting for a place.")
        self._prefill = seconds("request_prefill_time", "From the place to the first token.")
        self._decode = seconds("request_decode_time", "First token to last.")
        self._inference = seconds("request_inference_time", "From the place to the last token.")
        self._prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of an answer.")
        self._output_tokens = tokens("request_generation_tokens", "Tokens of an answer.")
        self._max_tokens = tokens("request_max_num_generation_tokens", "The same: an answer counts by itself.")
        self._ended = Counter(
            "vllm:request_success", "Answers that ended.", [*LABELS, "finished_reason"], registry=registry
        )

    def begin(self, model: str) -> None:
        """Create the series of a model with the value 0, so that they exist before its first choice."""
        for series in self._of_answers():
            series.labels(model, ENGINE)
        for finish_reason in FinishReason:
            self._ended.labels(model, ENGINE, finish_reason.value)
        for failure in (ABORTED, FAILED):
            self._ended.labels(model, ENGINE, failure)

    def note_pause(self, model: str, seconds: float) -> None:
        """Record the time between two rounds of a choice, in seconds."""
        self._between_outputs.labels(model, ENGINE).observe(seconds)

    def note_failure(self, model: str, reason: str) -> None:
        """Count a choice that ended with an error or whose client left. reason: FAILED or ABORTED."""
        self._ended.labels(model, ENGINE, reason).inc()

    def note(self, model: str, reason: FinishReason, usage: ChoiceUsage, times: ChoiceTimes) -> None:
        """Record the durations, tokens and finish reason of a choice that ended without an error."""
        self._ended.labels(model, ENGINE, reason.value).inc()
        values = (
            times.per_token_s or 0.0,
            times.last_s - times.admitted_s,
            times.placed_s - times.admitted_s,
            times.first_s - times.placed_s,
            times.last_s - times.first_s,
            times.last_s - times.placed_s,
            usage.num_prompt_tokens,
            usage.num_completion_tokens,
            usage.num_completion_tokens,
        )
        for series, value in zip(self._of_answers()[1:], values, strict=True):
            series.labels(model, ENGINE).observe(value)

    def _of_answers(self) -> Sequence[Histogram]:
        return (
            self._between_outputs,
            self._per_token,
            self._whole,
            self._queue,
            self._prefill,
            self._decode,
            self._inference,
            self._prompt_tokens,
            self._output_tokens,
            self._max_tokens,
        )


class VllmNames(Collector):
    """Prometheus collector of rounds, acceptance and load under the names that vLLM uses.

    The acceptance rate of the last five minutes, in PromQL:

    `rate(vllm:spec_decode_num_accepted_tokens_total[5m]) / rate(vllm:spec_decode_num_draft_tokens_total[5m])`
    """

    def __init__(self, metrics: GatewayMetrics, loads: Callable[[], Sequence[ModelLoad]]) -> None:
        self._metrics = metrics
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        loads = self._loads()
        yield from _gauges(loads)
        yield from self._counts_of_rounds(loads)
        own = self._metrics
        yield _renamed(own.time_to_first_token, "vllm:time_to_first_token_seconds", "Admission to first token.")
        yield _renamed(own.prompt_tokens, "vllm:prompt_tokens", "Prompt tokens of the answers that began.")
        yield _renamed(own.prompt_tokens, "vllm:prefix_cache_queries", "The same: each is looked for in the cache.")
        yield _renamed(own.cached_prompt_tokens, "vllm:prefix_cache_hits", "Of these, tokens that were cached.")

    def _counts_of_rounds(self, loads: Sequence[ModelLoad]) -> Iterable[Metric]:
        # Models whose targets have the same id are counted together, under the first model's name.
        own = self._metrics
        names = {load.target: load.name for load in reversed(loads)}
        summed = {
            "vllm:generation_tokens": (own.emitted_tokens, "Tokens committed."),
            "vllm:spec_decode_num_drafts": (own.rounds, "Verifies with at least one draft token."),
            "vllm:spec_decode_num_draft_tokens": (own.draft_tokens, "Draft tokens given to a verify."),
            "vllm:spec_decode_num_accepted_tokens": (own.accepted_tokens, "Draft tokens accepted."),
        }
        for name, (series, text) in summed.items():
            family = CounterMetricFamily(name, text, labels=LABELS)
            counts = _totals(own.counts(series), names)
            for model, count in counts.items():
                family.add_metric([model, ENGINE], count)
            yield family
        yield self._accepted_by_position(names)

    def _accepted_by_position(self, names: dict[str, str]) -> Metric:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position.",
            labels=[*LABELS, "position"],
        )
        counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        for series, factor in ((self._metrics.drafted_per_position, 0), (self._metrics.accepted_per_position, 1)):
            for labels, count in self._metrics.counts(series):
                counts[names.get(labels["target"], labels["target"]), labels["position"]] += factor * count
        by_model_and_position = sorted(counts.items(), key=lambda item: (item[0][0], int(item[0][1])))
        for (model, position), count in by_model_and_position:
            family.add_metric([model, ENGINE, position], count)
        return family


def _gauges(loads: Sequence[ModelLoad]) -> Iterable[Metric]:
    running = GaugeMetricFamily("vllm:num_requests_running", "Answers being decoded.", labels=LABELS)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Answers waiting for a place.", labels=LABELS)
    kv_share = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", labels=LABELS)
    cache = GaugeMetricFamily(
        "vllm:cache_config_info", "1; the KV cache, in its labels.", labels=[*LABELS, "block_size", "num_gpu_blocks"]
    )
    for load in loads:
        labels = [load.name, ENGINE]
        running.add_metric(labels, load.num_running)
        waiting.add_metric(labels, load.num_waiting)
        kv_share.add_metric(labels, load.kv_share)
        cache.add_metric([*labels, str(load.kv_block_size), str(load.num_kv_blocks)], 1)
    return running, waiting, kv_share, cache


def _totals(samples: Iterable[tuple[dict[str, str], float]], names: dict[str, str]) -> dict[str, float]:
    # An id that no model has any more is counted under itself.
    counts = defaultdict(float, dict.fromkeys(names.values(), 0.0))
    for labels, count in samples:
        counts[names.get(labels["target"], labels["target"])] += count
    return counts


def _renamed(series: Counter | Histogram, name: str, text: str) -> Metric:
    (family,) = series.collect()
    renamed = Metric(name, text, family.type)
    for sample in family.samples:
        ending = sample.name.removeprefix(family.name)  # such as _bucket, _sum, _total
        if ending != "_created":
            labels = dict(sample.labels)
            model = labels.pop("model")
            renamed.add_sample(name + ending, {"model_name": model, "engine": ENGINE, **labels}, sample.value)
    return renamed
