"""The protocol between the benchmark and an engine: a line of JSON in, a line of JSON out.

Every adapter in this folder is a process of its own in an environment of its own, so this file needs nothing but the
standard library. An adapter reads a Setup, loads its models, writes {"ready": version} and answers one Job a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

NGRAM = 3
"""Most tokens by which an engine looks up what followed them before, where it has such a setting: as many as ours."""


class Lacks(Exception):
    """Raised when the engine has no such mode; the message says what it lacks."""


@dataclass(frozen=True)
class Setup:
    """Settings with which an engine is started."""

    target: str
    """Folder of the target's checkpoint."""
    draft: str
    """Folder of the draft's; empty = the engine drafts with what it has without a second model."""
    dtype: str
    """float32 or bfloat16, of both models."""
    num_draft_tokens: int
    """K."""
    cores: list[int]
    """Cores on which the process stays, with one thread a core."""
    max_concurrency: int
    context: int
    """Most tokens of prompt and answer together."""
    folder: str
    """Folder where converted models are kept from run to run; one for each target and dtype."""
    options: dict[str, str] = field(default_factory=dict)
    """An engine's own settings, such as where its program lies."""


@dataclass(frozen=True)
class Job:
    """Prompts to answer, `concurrency` of them at a time; ends of sequence are ignored."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    concurrency: int
    speculative: bool
    seed: int


@dataclass
class Answer:
    """The outcome of a job."""

    outputs: list[list[int]]
    """Token ids in the order of the prompts."""
    elapsed_s: float
    num_drafted: int | None = None
    num_accepted: int | None = None
    detail: dict[str, float] = field(default_factory=dict)
    """Seconds by name of a part, for an engine that can tell."""


class Engine(Protocol):
    version: str

    def run(self, job: Job) -> list[list[int]] | Answer:
        """Answer a job. The caller times an answer of ids alone. Raises Lacks."""

    def close(self) -> None: ...


def in_groups(prompts: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    for start in range(0, len(prompts), size):
        yield list(prompts[start : start + size])


def serve(make: Callable[[Setup], Engine]) -> None:
    """Run an adapter for its whole life. Whatever a library prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    setup = Setup(**json.loads(sys.stdin.readline()))
    os.sched_setaffinity(0, setup.cores)
    try:
        engine = make(setup)
    except Lacks as lacks:
        say({"lacks": str(lacks)})
        return
    say({"ready": engine.version})
    try:
        for line in sys.stdin:
            say(_answer(engine, Job(**json.loads(line))))
    finally:
        engine.close()


def _answer(engine: Engine, job: Job) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        made = engine.run(job)
    except Lacks as lacks:
        return {"lacks": str(lacks)}
    if not isinstance(made, Answer):
        made = Answer(made, time.perf_counter() - started)
    return asdict(made)
