"""Metric series of a model's rounds: the label `draft` of each draft, and which series stay after a draft has left.

Each `ServedModel` has one `RoundSeries`; the decode loop counts rounds in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.workers.member import DraftMember
from outrider.wire.telemetry.metrics import GatewayMetrics, PairMetrics

MAX_GONE_DRAFTS = 8
"""Number of draft models whose series are kept after the last draft worker with that model has left, so that the next
scrape, seconds later, still reads their last counts."""


class RoundSeries:
    """Metric series of a model's rounds. The label `draft` is a draft worker's model or the target's own drafter."""

    def __init__(self, metrics: GatewayMetrics, drafts: Callable[[], Mapping[str, DraftMember]]) -> None:
        """Create the series. drafts: returns the draft workers that serve the model now, by name."""
        self.target_label = ""
        """Value of the label `target` of all these series; empty before the first target has connected."""
        self._metrics = metrics
        self._drafts = drafts
        self._last_label = ""
        """Value of the label `draft` for rounds without a draft worker: that of the last connected one
        in the order of the membership."""
        self._used_labels: dict[str, None] = {}
        """Values of the label `draft` that have series. Those of draft workers that have left come first, in the order
        in which they left."""

    def label_of(self, draft: DraftMember | None) -> str:
        """Return the label `draft` of a draft worker; for None, that of the last connected one in the
        order of the membership ("" = none).
        """
        if draft is None:
            return self._last_label
        return self._labels().get(draft.name, self._last_label)

    def pair(self, label: str) -> PairMetrics:
        """Return the series of rounds whose label `draft` has the value `label`. Creates them if needed."""
        if label not in self._used_labels:
            self._drop_old()
            self._used_labels[label] = None
        return self._metrics.pair(self.target_label, label)

    def own(self, label: str) -> PairMetrics:
        """Return the series of rounds in which no draft worker drafted.

        label: name of the target's own drafter, or GRAMMAR for tokens that a grammar forces.
        """
        return self._metrics.pair(self.target_label, label)

    def update(self) -> None:
        """Create the series of connected draft workers. Drop the series of draft models without a worker, except those
        of the last MAX_GONE_DRAFTS that have counts.

        Call it whenever a draft worker connects, leaves or changes, once `target_label` is set.
        """
        drafts = self._drafts()
        for name, label in self._labels().items():
            if drafts[name].connection is not None:
                self.pair(label)  # it exists from now on: a rate misses the counts with which a series is born
                self._last_label = label
        self._drop_old()

    def _labels(self) -> dict[str, str]:
        """By the draft's name.

        # two folders /a/small and /b/small of the pools x and y: "small@x" and "small@y"
        """
        drafts = self._drafts().values()
        paths: dict[str, set[str]] = {}  # of the models of one id
        for draft in drafts:
            if draft.link.info is not None:
                paths.setdefault(draft.link.info.model_id, set()).add(draft.link.model_path)
        labels: dict[str, str] = {}
        for draft in drafts:
            if draft.link.info is not None:
                label: str = draft.link.info.model_id
                if len(paths[label]) > 1:
                    label = f"{label}@{draft.spec.pool}"
                labels[draft.name] = label
        return labels

    def _drop_old(self) -> None:
        # The series of the last MAX_GONE_DRAFTS drafts that counted anything stay: a scrape may still read them.
        present = set(self._labels().values())
        for label in present & self._used_labels.keys():
            del self._used_labels[label]
            self._used_labels[label] = None  # at the end: the last to go
        removed = [label for label in self._used_labels if label and label not in present]  # the oldest first
        counted = [label for label in removed if self._metrics.has_counts(self.target_label, label)]
        for label in removed:
            if label not in counted[-MAX_GONE_DRAFTS:]:
                self._metrics.forget_pair(self.target_label, label)
                del self._used_labels[label]
        if self._last_label not in self._used_labels:
            self._last_label = ""
