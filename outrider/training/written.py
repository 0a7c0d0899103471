"""Generate the text to train on with the target, and keep it in a folder. Called by `train_head`.

Drafters predict the target along the target's own outputs, so they are trained on such outputs, at the temperatures of
later requests (DistillSpec, 2310.08461). An interrupted run is continued from the folder, and several trainings share
it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.attention.varlen_attention import BLOCK_SIZE
from outrider.engine.kv_pool import BlockTable
from outrider.engine.loading.loaded import load
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.token_distribution import COLDEST
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig

AT_ONCE = 64
"""Number of outputs that the target generates in one batch, and that are saved in one file."""
PROMPT_TOKENS = 128
"""Maximum number of tokens of a prompt's text (without the chat template's tokens). Of a longer text only the last
tokens are kept."""
MIN_PROMPT_TOKENS = 2
"""Minimum number of tokens of a prompt: two, since a head reads the prompt's last token with the hidden state of the
token before."""

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's output for it."""

    ids: NDArray[np.int32]
    """Token ids of the prompt, followed by those of the output."""
    start: int
    """Number of prompt tokens, which is the index of the output's first token in `ids`."""
    temperature: float


@dataclass(frozen=True)
class GenerationTask:
    """Settings from which the target generates the training text. The same settings give the same text, even if the
    work is interrupted and continued.
    """

    target: str
    """Folder of the target."""
    prompts: Sequence[tuple[Ids, float]]
    """Token ids and temperature of each prompt."""
    max_tokens: int
    """Maximum number of tokens of an output. An output that reaches an end-of-sequence id is shorter."""
    seed: int
    device: str = "auto"

    @cached_property
    def digest(self) -> str:
        """Digest of the target's files, the prompts and the settings, in 16 hexadecimal digits."""
        parts = [digest_of_model(self.target), list(self.prompts), self.max_tokens, self.seed, AT_ONCE]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def digest_of_model(folder: str) -> str:
    """Return a digest of a model's config.json and weights, in 16 hexadecimal digits."""
    sha = hashlib.sha256()
    for path in sorted(Path(folder).expanduser().glob("*")):
        if path.name == "config.json" or path.suffix == ".safetensors":
            with path.open("rb") as file:
                sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()[:16]


def generate(task: GenerationTask, work: Path, report: Callable[[int, int], None]) -> list[Answer]:
    """Return the outputs for all prompts of `task`. Outputs that an earlier run saved in the folder `work` are read;
    the others are generated and saved there.

    report: called before every step with (number of tokens done, number of tokens in all). An output that ended early
    counts as `max_tokens` tokens. Raises ConfigError for a target that cannot be loaded, and for prompts that are too
    short, too long or outside the target's vocabulary.
    """
    folder = work / f"text-{task.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    num_done = 0
    num_total = len(task.prompts) * task.max_tokens
    writer: _Writer | None = None

    def report_part(num_tokens: int) -> None:
        report(num_done + num_tokens, num_total)

    for number, first in enumerate(range(0, len(task.prompts), AT_ONCE)):
        part = task.prompts[first : first + AT_ONCE]
        report_part(0)
        path = folder / f"{number:05}.npz"
        if not path.is_file():
            writer = writer or _Writer(task)
            _save(path, writer.generate(part, number, report_part))
        num_done += len(part) * task.max_tokens
    report_part(0)
    return read(folder)


def read(folder: Path) -> list[Answer]:
    """Return the prompts and outputs that `generate` saved in the folder."""
    answers: list[Answer] = []
    for path in sorted(folder.glob("*.npz")):
        answers += _load(path)
    return answers


@dataclass
class _Output:
    """An output while it is generated."""

    ids: Ids
    """Token ids of prompt and output so far."""
    start: int
    """Number of prompt tokens."""
    temperature: float
    table: BlockTable
    num_cached: int = 0


class _Writer:
    def __init__(self, task: GenerationTask) -> None:
        longest = max(len(ids) for ids, _ in task.prompts) + task.max_tokens
        count = min(AT_ONCE, len(task.prompts))
        config = TargetConfig(
            model=task.target,
            device=task.device,
            kv_cache_tokens=count * (longest + BLOCK_SIZE),  # the last block of an output may be nearly empty
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

    def generate(
        self, prompts: Sequence[tuple[Ids, float]], number: int, report: Callable[[int], None]
    ) -> list[Answer]:
        """Generate the outputs of one batch. The draws depend only on the seed and on `number`, the number of the
        batch.

        prompts: token ids and temperature of each. report: called before every step with the number of steps done times
        the number of prompts.
        """
        rng = np.random.default_rng((self._task.seed, number))
        outputs = []
        for ids, temperature in prompts:
            outputs.append(_Output(list(ids), len(ids), temperature, self._runner.pool.new_table()))
        running = outputs
        try:
            for step in range(self._task.max_tokens):
                report(step * len(prompts))
                rows = [Row.of(output.table, output.ids, output.num_cached, 1) for output in running]
                logits = self._runner.forward(rows)  # [n, V] float32
                temperatures = [output.temperature for output in running]
                drawn = draw(logits.cpu(), temperatures, rng.random(len(running)))
                for output, token_id in zip(running, drawn, strict=True):
                    output.num_cached = len(output.ids)
                    output.ids.append(token_id)
                running = [output for output in running if output.ids[-1] not in self._runner.facts.eos_token_ids]
                if not running:
                    break
        finally:
            for output in outputs:
                output.table.free()
        answers = []
        for output in outputs:
            answers.append(Answer(np.array(output.ids, dtype=np.int32), output.start, output.temperature))
        return answers


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: NDArray[np.float64]) -> Ids:
    """Draw a token id for each row of `logits` [n, V], at the row's temperature. At temperature 0 it is the most likely
    id.

    uniforms: [n], the random numbers in [0, 1) from which the ids are drawn, by the inverse CDF. The cumulative sums
    are float64: with float32 sums, ids with a probability below 6e-8 would be drawn never or too often.
    """
    ids = []
    for row, temperature, uniform in zip(logits, temperatures, uniforms.tolist(), strict=True):
        ids.append(_draw(row, temperature, uniform))
    return ids


def _draw(logits: Tensor, temperature: float, uniform: float) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    probs = (logits / max(temperature, COLDEST)).softmax(dim=-1)  # [V] float32; one row stays in the core's cache
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)  # [V]
    return min(int(torch.searchsorted(cdf, uniform * cdf[-1:], right=True)), len(cdf) - 1)


def _save(path: Path, answers: Sequence[Answer]) -> None:
    ids = np.concatenate([answer.ids for answer in answers])  # [sum of lengths] int32
    lengths: list[int] = []
    starts: list[int] = []
    temperatures: list[float] = []
    for answer in answers:
        lengths.append(len(answer.ids))
        starts.append(answer.start)
        temperatures.append(answer.temperature)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.savez(
            file,
            ids=ids,
            lengths=np.array(lengths),
            starts=np.array(starts),
            temperatures=np.array(temperatures),
        )
    os.replace(new, path)  # so that an interruption leaves no half of a file


def _load(path: Path) -> Iterator[Answer]:
    with np.load(path, allow_pickle=False) as file:
        ends = file["lengths"].cumsum()
        for ids, start, temperature in zip(
            np.split(file["ids"], ends[:-1]), file["starts"].tolist(), file["temperatures"].tolist(), strict=True
        ):
            yield Answer(ids, start, temperature)
