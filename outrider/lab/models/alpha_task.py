"""Settings of a measurement of acceptance, as `outrider alpha` sends them to its process. Used by `alpha`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

MODEL = "model"
"""Kind of a drafter that is a draft model."""


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter to be measured."""

    kind: str
    """MODEL, or the name of a table of tokens: unigram, bigram, ngram or lookup."""
    source: str | None
    """Folder or hub id of a model; text file of `unigram` and `bigram`; None for the others."""

    @property
    def name(self) -> str:
        """Name in rows and in progress."""
        if self.source is None:
            return self.kind
        return f"{self.kind}:{self.source}"


@dataclass(frozen=True)
class Task:
    """The settings of a measurement."""

    target: str
    """Folder or hub id of the target."""
    drafters: list[DrafterSpec]
    prompts: list[str]
    max_tokens: int
    """Most tokens of an output."""
    settings: list[dict[str, float]]
    """Fields of SamplingParams under each of which is measured: temperature, top_k, top_p, min_p."""
    dtype: str = "auto"
    device: str = "auto"
    leniences: list[float] = field(default_factory=list)
    """Values of lenience for each of which the rows have the acceptance on the same text."""

    @classmethod
    def read(cls, line: str) -> Task:
        """Parse a line of JSON."""
        values = json.loads(line)
        values["drafters"] = [DrafterSpec(**drafter) for drafter in values["drafters"]]
        return cls(**values)
