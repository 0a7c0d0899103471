"""Read Prometheus' text form, and say what happened between two readings of one process. For `top`; no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Scrape:
    """Every sample of a /metrics at one moment."""

    at_s: float
    """Of a clock that never goes back."""
    samples: Mapping[str, list[tuple[Labels, float]]]
    """By the sample's name, such as spec_rounds_total."""

    @classmethod
    def parse(cls, text: str, at_s: float) -> Scrape:
        """Read what a /metrics answered. Raises ValueError for what is not in that form."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
        return cls(at_s, samples)

    def find(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """Yield the samples of a name that have these labels, among others."""
        for found, value in self.samples.get(name, ()):
            if labels.items() <= found.items():
                yield found, value

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of those samples; None where there is none."""
        values = [value for _, value in self.find(name, **labels)]
        return sum(values) if values else None

    @property
    def started_s(self) -> float | None:
        """Return when the process began, in Unix seconds."""
        return self.value(_STARTED)


@dataclass(frozen=True, slots=True)
class Span:
    """What happened in one process between two scrapes. Every method returns None where nothing can be said."""

    before: Scrape
    after: Scrape

    @property
    def is_empty(self) -> bool:
        """Return whether there was no second scrape yet."""
        return self.after.at_s <= self.before.at_s

    def increase(self, name: str, **labels: str) -> float | None:
        """Return how much counters grew, in sum. From 0 where the process was started anew, or a series is new."""
        after = self.after.value(name, **labels)
        if self.is_empty or after is None:
            return None
        is_same_life = self.before.started_s == self.after.started_s
        return after - ((self.before.value(name, **labels) or 0.0) if is_same_life else 0.0)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the increase per second."""
        grown = self.increase(name, **labels)
        return None if grown is None else grown / (self.after.at_s - self.before.at_s)

    def mean(self, name: str, **labels: str) -> float | None:
        """Return the mean of what a histogram observed."""
        return ratio(self.increase(f"{name}_sum", **labels), self.increase(f"{name}_count", **labels))

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Return a quantile of what a histogram observed as PromQL's histogram_quantile does: linear within a bucket,
        the lower bound of the last, which has no upper one.
        """
        texts = {float(found["le"]): found["le"] for found, _ in self.after.find(f"{name}_bucket", **labels)}
        bounds = sorted(texts)
        counts = [self.increase(f"{name}_bucket", le=texts[bound], **labels) or 0.0 for bound in bounds]
        if not counts or not counts[-1]:
            return None
        rank, lower, below = share * counts[-1], 0.0, 0.0
        for bound, count in zip(bounds, counts, strict=True):
            if count >= rank:
                return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
            lower, below = bound, count
        return None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part over whole; None where either is not known or the whole is nothing."""
    return None if part is None or not whole else part / whole
