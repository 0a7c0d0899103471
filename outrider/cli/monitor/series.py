"""Parses replies of /metrics in Prometheus' text format, and compares two scrapes of one process. For `top`; no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one reply of a process's /metrics."""

    at_s: float
    """Monotonic time of the reply, in seconds."""
    samples: Mapping[str, list[tuple[Labels, float]]]
    """Samples by name, such as spec_rounds_total: a list of (labels, value)."""

    @classmethod
    def parse(cls, text: str, at_s: float) -> Scrape:
        """Parse the text of a reply of /metrics. at_s: monotonic time of the reply, in seconds. Raises ValueError for a
        text in another format.
        """
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
        return cls(at_s, samples)

    def find(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """Yield (labels, value) of each sample of the series `name` whose labels include `labels`."""
        for found, value in self.samples.get(name, ()):
            if labels.items() <= found.items():
                yield found, value

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of all samples of the series `name` whose labels include `labels`; None = there are none."""
        values = [value for _, value in self.find(name, **labels)]
        if not values:
            return None
        return sum(values)

    @property
    def started_s(self) -> float | None:
        """Time at which the process started, in Unix seconds; None = the process does not export it."""
        return self.value(_STARTED)


@dataclass(frozen=True, slots=True)
class ScrapeInterval:
    """Two successive scrapes of one process, from which rates are computed."""

    before: Scrape
    after: Scrape

    @property
    def is_empty(self) -> bool:
        """Whether there was only one scrape so far. Rates need two."""
        return self.after.at_s <= self.before.at_s

    def increase(self, name: str, **labels: str) -> float | None:
        """Return how much the sum of the counters with this name and labels grew between the two scrapes. A counter
        that is new, or whose process was restarted in between, is taken to have grown from 0. None = the later scrape
        has none, or is the only one.
        """
        after = self.after.value(name, **labels)
        if self.is_empty or after is None:
            return None
        if self.before.started_s != self.after.started_s:
            return after
        return after - (self.before.value(name, **labels) or 0.0)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the increase per second of the counters with this name and labels; None = none, or only one scrape."""
        increase = self.increase(name, **labels)
        if increase is None:
            return None
        return increase / (self.after.at_s - self.before.at_s)

    def mean(self, name: str, **labels: str) -> float | None:
        """Return the mean of the values that a histogram observed between the scrapes; None = it observed none."""
        return ratio(self.increase(f"{name}_sum", **labels), self.increase(f"{name}_count", **labels))

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Return a quantile of the values that a histogram observed between the scrapes; share: 0 to 1. It is computed
        as in PromQL's histogram_quantile: by linear interpolation in a bucket. In the last bucket, which has no
        upper bound, the result is the lower bound. None = nothing was observed.
        """
        texts = {float(found["le"]): found["le"] for found, _ in self.after.find(f"{name}_bucket", **labels)}
        counts = dict[float, float]()  # observations up to each bound
        num_observations = 0.0
        for bound in sorted(texts):
            num_observations = self.increase(f"{name}_bucket", le=texts[bound], **labels) or 0.0
            counts[bound] = num_observations
        if not num_observations:
            return None
        rank = share * num_observations
        # bounds 1, 2 with counts 4, 8: rank 6 is half-way in the second bucket, 1.5
        lower = 0.0
        num_below = 0.0
        for bound, count in counts.items():
            if count >= rank:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * (rank - num_below) / (count - num_below)
            lower = bound
            num_below = count
        return None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return `part` divided by `whole`; None = one of them is None, or `whole` is 0."""
    if part is None or not whole:
        return None
    return part / whole
