"""Text that a target writes, kept in a folder so that an interrupted run goes on and several trainings share it.

A drafter is asked what the target would say after what the target has said: text of its own, at the temperatures that
are served, holds what it will be asked (DistillSpec, 2310.08461).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.attention.varlen_attention import BLOCK_SIZE
from outrider.engine.loading.loaded import load
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.row_law import COLDEST
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig

AT_ONCE = 64
"""Answers that are written side by side and saved together. Doubling it doubles the cache and what an interruption
loses."""
PROMPT_TOKENS = 128
"""Most tokens of a prompt: of longer ones the end is kept. Doubling it trains for later positions on fewer tokens of
the target's own."""
MIN_PROMPT_TOKENS = 2
"""Least tokens of a prompt: with fewer a head has no hidden state of the token before the last."""

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target wrote after it."""

    ids: NDArray[np.int32]
    """Of both."""
    start: int
    """Tokens of the prompt."""
    temperature: float


@dataclass(frozen=True)
class Assignment:
    """What is to be written: the same assignment has the same text, whenever and in how many runs it is written."""

    target: str
    """Folder."""
    prompts: Sequence[tuple[Ids, float]]
    """Token ids and temperature of each."""
    max_tokens: int
    """Of an answer; one that reaches an end of sequence is shorter."""
    seed: int
    device: str = "auto"

    @cached_property
    def digest(self) -> str:
        """Names the text: of the target's files, the prompts and the rest."""
        rest = [digest_of_model(self.target), list(self.prompts), self.max_tokens, self.seed, AT_ONCE]
        return hashlib.sha256(json.dumps(rest).encode()).hexdigest()[:16]


def digest_of_model(folder: str) -> str:
    """Return what tells a model's configuration and weights from others."""
    sha = hashlib.sha256()
    for path in sorted(Path(folder).expanduser().glob("*")):
        if path.name == "config.json" or path.suffix == ".safetensors":
            with path.open("rb") as file:
                sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()[:16]


def write(task: Assignment, work: Path, tell: Callable[[int, int], None]) -> list[Answer]:
    """Return the text; what `work` does not have of it is written.

    tell: called before every step with (tokens that are there, all), where an answer that ended counts as one that did
    not. Raises ConfigError for a target that cannot be loaded, and for prompts that do not fit it.
    """
    folder = work / f"text-{task.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    parts = [task.prompts[first : first + AT_ONCE] for first in range(0, len(task.prompts), AT_ONCE)]
    writer: _Writer | None = None
    before, total = 0, len(task.prompts) * task.max_tokens

    def told(num_tokens: int, before: int) -> None:
        tell(before + num_tokens, total)

    for number, part in enumerate(parts):
        tell(before, total)
        path = folder / f"{number:05}.npz"
        if not path.is_file():
            writer = writer or _Writer(task)
            _save(path, writer.write(part, number, partial(told, before=before)))
        before += len(part) * task.max_tokens
    tell(total, total)
    return read(folder)


def read(folder: Path) -> list[Answer]:
    """Return what was written into a folder."""
    return [answer for path in sorted(folder.glob("*.npz")) for answer in _load(path)]


class _Writer:
    def __init__(self, task: Assignment) -> None:
        longest = max(len(ids) for ids, _ in task.prompts) + task.max_tokens
        count = min(AT_ONCE, len(task.prompts))
        config = TargetConfig(
            model=task.target,
            device=task.device,
            kv_cache_tokens=count * (longest + BLOCK_SIZE),  # each may leave its last block nearly empty
            max_slots=count,
        )
        self._task = task
        self._runner: ModelRunner = load(config, epoch=1).runner
        facts = self._runner.facts
        if longest > facts.context_limit:
            raise ConfigError(
                f"the longest prompt and {task.max_tokens} tokens are {longest}, the context limit of {task.target} is "
                f"{facts.context_limit}; lower --max-tokens"
            )
        for ids, _ in task.prompts:
            if len(ids) < MIN_PROMPT_TOKENS or max(ids) >= facts.vocab_size:
                raise ConfigError(
                    f"a prompt has the token ids {ids[:8]}, must have {MIN_PROMPT_TOKENS} or more below "
                    f"{facts.vocab_size}"
                )

    def write(self, prompts: Sequence[tuple[Ids, float]], number: int, tell: Callable[[int], None]) -> list[Answer]:
        """Write a part. Its draws depend on the seed and its number alone.

        tell: called before every step with the tokens that are there.
        """
        rng = np.random.default_rng((self._task.seed, number))
        sequences = [list(ids) for ids, _ in prompts]
        tables, cached = [self._runner.pool.new_table() for _ in sequences], [0] * len(sequences)
        unended = list(range(len(sequences)))
        try:
            for step in range(self._task.max_tokens):
                tell(step * len(prompts))
                logits = self._runner.forward([Row.of(tables[i], sequences[i], cached[i], 1) for i in unended])
                drawn = draw(logits.cpu(), [prompts[i][1] for i in unended], rng.random(len(unended)))
                for i, token_id in zip(unended, drawn, strict=True):
                    cached[i] = len(sequences[i])
                    sequences[i].append(token_id)
                unended = [i for i in unended if sequences[i][-1] not in self._runner.facts.eos_token_ids]
                if not unended:
                    break
        finally:
            for table in tables:
                table.free()
        return [
            Answer(np.array(ids, dtype=np.int32), len(prompt), temperature)
            for ids, (prompt, temperature) in zip(sequences, prompts, strict=True)
        ]


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: NDArray[np.float64]) -> Ids:
    """Draw an id from each row of logits [n, V] at its temperature, 0 the best, by the inverse CDF at uniforms [n].

    Probabilities are float32 and their sums float64: in float32 ids below 6e-8 would have none, or their neighbours'.
    """
    return [_draw(*each) for each in zip(logits, temperatures, uniforms.tolist(), strict=True)]


def _draw(logits: Tensor, temperature: float, uniform: float) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    probs = (logits / max(temperature, COLDEST)).softmax(dim=-1)  # a row at a time stays in the core's cache
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)  # [V]
    return min(int(torch.searchsorted(cdf, uniform * cdf[-1:], right=True)), len(cdf) - 1)


def _save(path: Path, answers: Sequence[Answer]) -> None:
    """Write the file whole or not at all."""
    lengths = np.array([len(answer.ids) for answer in answers])
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate([answer.ids for answer in answers]),
            lengths=lengths,
            starts=np.array([answer.start for answer in answers]),
            temperatures=np.array([answer.temperature for answer in answers]),
        )
    os.replace(new, path)


def _load(path: Path) -> Iterator[Answer]:
    with np.load(path, allow_pickle=False) as file:
        ends = file["lengths"].cumsum()
        for ids, start, temperature in zip(
            np.split(file["ids"], ends[:-1]), file["starts"].tolist(), file["temperatures"].tolist(), strict=True
        ):
            yield Answer(ids, start, temperature)
