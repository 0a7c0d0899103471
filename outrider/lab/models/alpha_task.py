"""Settings of a measurement of acceptance, which `outrider alpha` sends to its child process. Used by `alpha`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

MODEL = "model"
"""Value of `DrafterSpec.kind` for a draft model."""


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter to be measured."""

    kind: str
    """MODEL, or the label of a drafter without a model: unigram, bigram, ngram or lookup."""
    source: str | None
    """Folder or hub id of a draft model, or path of the text file in which `unigram` or `bigram` counts tokens. None
    for other kinds."""

    @property
    def name(self) -> str:
        """Name of the drafter in the report's rows and in progress messages: its kind, with ":" and the source if it
        has one.
        """
        if self.source is None:
            return self.kind
        return f"{self.kind}:{self.source}"


@dataclass(frozen=True)
class AlphaTask:
    """Settings of one measurement of acceptance."""

    target: str
    """Folder or hub id of the target."""
    drafters: list[DrafterSpec]
    prompts: list[str]
    max_tokens: int
    """Maximum number of tokens of an output."""
    settings: list[dict[str, float]]
    """Sampling settings to measure under. Each has fields of SamplingParams: temperature, top_k, top_p, min_p."""
    dtype: str = "auto"
    device: str = "auto"
    leniences: list[float] = field(default_factory=list)
    """Values of lenience, beside 1, under which each row of the report also has the acceptance probability."""

    @classmethod
    def read(cls, line: str) -> AlphaTask:
        """Parse a task from a line of JSON."""
        values = json.loads(line)
        values["drafters"] = [DrafterSpec(**drafter) for drafter in values["drafters"]]
        return cls(**values)
