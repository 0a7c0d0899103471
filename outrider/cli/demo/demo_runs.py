"""What the demo measures: the same greedy answers with and without drafts, and who else would give them."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.client import Client, ConfigError, GenerateOptions, OutriderError, Round, Speculation, Usage
from outrider.client.usage import total_usage
from outrider.wire.processes.processes import LOOK_S, Child, StopFlag
from outrider.wire.settings.system import demo_model

REFERENCE_TIMEOUT_S = 600.0
"""Seconds for transformers' own answers."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One greedy answer."""

    prompt: str
    text: str
    ids: list[int]
    usage: Usage
    elapsed_s: float
    """From the call to the last token, as the client saw it."""


@dataclass(frozen=True, slots=True)
class Asking:
    """How the demo asks for its answers."""

    client: Client
    max_tokens: int
    repetition_penalty: float
    stop: StopFlag

    def answer(
        self,
        prompt: str,
        speculation: Speculation | bool,
        prediction: str | None = None,
        show: Callable[[Round], None] = lambda round_: None,
    ) -> DemoAnswer:
        """Stream one greedy answer. Raises StopRequested between two rounds."""
        started = time.perf_counter()
        rounds: list[Round] = []
        options = GenerateOptions(
            max_tokens=self.max_tokens,
            temperature=0.0,
            repetition_penalty=self.repetition_penalty,
            speculation=speculation,
        )
        if prediction is not None:
            options["prediction"] = prediction
        with self.client.stream(prompt, **options) as stream:
            for round_ in stream:
                self.stop.check()
                show(round_)
                rounds.append(round_)
        usage = rounds[-1].usage if rounds else None
        if usage is None:
            raise OutriderError("the gateway ended the stream without its last message")
        text = "".join(round_.text_delta for round_ in rounds)
        return DemoAnswer(prompt, text, list(_ids(rounds)), usage, time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same answer without drafts and with them, each made twice."""

    plain: tuple[DemoAnswer, DemoAnswer]
    drafted: tuple[DemoAnswer, DemoAnswer]

    @property
    def answers(self) -> list[DemoAnswer]:
        return [*self.plain, *self.drafted]

    @property
    def speedup(self) -> float:
        """Times as fast as without drafts."""
        return sum(one.elapsed_s for one in self.plain) / sum(one.elapsed_s for one in self.drafted)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of one part of the demo."""

    pairs: list[Pair]
    """By prompt."""

    @property
    def speedup(self) -> float:
        """Median over the prompts."""
        return statistics.median(pair.speedup for pair in self.pairs)

    @property
    def speedups(self) -> list[float]:
        """From the smallest to the largest."""
        return sorted(pair.speedup for pair in self.pairs)

    @property
    def usage(self) -> Usage:
        """Of the answers with drafts."""
        return total_usage([answer.usage for pair in self.pairs for answer in pair.drafted])

    @property
    def answers(self) -> list[DemoAnswer]:
        return [answer for pair in self.pairs for answer in pair.answers]

    @property
    def round_cost(self) -> float:
        """Time of a round with drafts over that of a plain step."""
        plain = [answer for pair in self.pairs for answer in pair.plain]
        drafted = [answer for pair in self.pairs for answer in pair.drafted]
        return _step_s(drafted) / _step_s(plain)


def _step_s(answers: Sequence[DemoAnswer]) -> float:
    """Return the seconds of a pass of the target, all around it included."""
    usage = total_usage([answer.usage for answer in answers])
    return sum(answer.elapsed_s for answer in answers) / max(1, usage.num_rounds + usage.num_plain_steps)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How answers compare with transformers' own `generate` on the target."""

    num_answers: int
    num_tokens: int
    differences: list[dict[str, Any]]
    """answer, position, expected, found, top2_gap."""


def measure(asking: Asking, prompt: str, speculation: Speculation, before: Callable[[str], str] | None) -> Pair:
    """Return answers to a prompt without and with drafts, in turn, so that what else the machine does falls on both.

    before: makes the prediction from the answer.
    """
    first = asking.answer(prompt, False)
    prediction = None if before is None else before(first.text)
    drafted = [asking.answer(prompt, speculation, prediction) for _ in range(2)]
    return Pair((first, asking.answer(prompt, False)), (drafted[0], drafted[1]))


def compare(
    model: str, max_tokens: int, repetition_penalty: float, answers: Sequence[DemoAnswer], stop: StopFlag
) -> Comparison:
    """Have a separate process generate from the prompts with transformers, and compare. Ends the process."""
    task = {
        "model": model,
        "max_tokens": max_tokens,
        "repetition_penalty": repetition_penalty,
        "prompts": [one.prompt for one in answers],
        "answers": [one.ids for one in answers],
    }
    args = [sys.executable, "-m", "outrider.lab.models.reference_generate"]
    child = Child("reference", args, stdin=json.dumps(task) + "\n", notify=stop.notify)
    try:
        event = _await_compared(child, stop)
    finally:
        child.stop(grace_s=1.0)
        child.close()
    return Comparison(len(answers), event["num_tokens"], event["differences"])


def read_prompts(path: Path) -> list[str]:
    """Return the `prompt` of each line of a JSONL file. Raises ConfigError naming the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from None
    return [_prompt_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def first_prompts(path: Path | None, count: int) -> list[str]:
    """Return the first prompts of a file, by default the demo pair's. Raises ConfigError when it has none."""
    file = path or Path(demo_model("target")).parent / "prompts.jsonl"
    texts = read_prompts(file)[:count]
    if not texts:
        raise ConfigError(f"{file} has no prompt; each line is to be an object with a `prompt`")
    return texts


def _prompt_of(line: str, where: str) -> str:
    wanted = 'each line is to be an object with a text as `prompt`, such as {"prompt": "Once"}'
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); {wanted}") from None
    prompt = item.get("prompt") if isinstance(item, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(f"{where} is {line[:80]!r}; {wanted}")
    return prompt


def _ids(rounds: Sequence[Round]) -> Iterator[int]:
    for round_ in rounds:
        for token in round_.tokens:
            yield token.id


def _await_compared(child: Child, stop: StopFlag) -> dict[str, Any]:
    give_up = time.monotonic() + REFERENCE_TIMEOUT_S
    while time.monotonic() < give_up:
        stop.check()
        has_ended = child.has_ended()
        if not child.events.empty():
            return child.events.get()
        if has_ended:
            break
        stop.wait(LOOK_S)
    raise OutriderError(
        f"transformers' generate gave no result: {' / '.join(child.last_lines(5)) or 'it said nothing'}"
    )
