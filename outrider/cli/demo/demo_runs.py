"""Measures the same greedy outputs with drafting and without, and compares them with transformers'. For `demo.py`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.client import Client, ConfigError, GenerateOptions, OutriderError, Round, Speculation, Usage
from outrider.client.usage import total_usage
from outrider.wire.processes.processes import POLL_S, Child
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.system import demo_model

REFERENCE_TIMEOUT_S = 600.0
"""Maximum seconds for transformers to generate all outputs with which the demo's outputs are compared."""


@dataclass(frozen=True, slots=True)
class DemoOutput:
    """One greedy output with its usage and time."""

    prompt: str
    text: str
    ids: list[int]
    usage: Usage
    elapsed_s: float
    """Seconds from the call to the last token, measured by the client."""


@dataclass(frozen=True, slots=True)
class DemoRequests:
    """Client and parameters that all requests of the demo share."""

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
    ) -> DemoOutput:
        """Send a request, read its greedy output to the end and return it.

        show: called with each round. Raises StopRequested between two rounds if a stop was requested.
        """
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
        if not rounds or rounds[-1].usage is None:
            raise OutriderError("the gateway ended the stream without its last message")
        elapsed_s = time.perf_counter() - started
        text = ""
        ids = list[int]()
        for round_ in rounds:
            text += round_.text_delta
            ids += [token.id for token in round_.tokens]
        return DemoOutput(prompt, text, ids, rounds[-1].usage, elapsed_s)


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """The four outputs to one prompt: two by plain decoding and two with drafting, so that a change of the machine's
    other load slows both ways alike.
    """

    plain: tuple[DemoOutput, DemoOutput]
    drafted: tuple[DemoOutput, DemoOutput]

    @property
    def answers(self) -> list[DemoOutput]:
        """All four outputs to the prompt."""
        return [*self.plain, *self.drafted]

    @property
    def speedup(self) -> float:
        """Speed with drafting divided by the speed of plain decoding."""
        return _elapsed_s(self.plain) / _elapsed_s(self.drafted)


@dataclass(frozen=True, slots=True)
class Measurement:
    """All outputs that were measured for one way to draft."""

    per_prompt: list[PromptOutputs]
    """One entry for each prompt: its two outputs by plain decoding and its two with drafting."""

    @property
    def speedup(self) -> float:
        """Speed with drafting divided by the speed of plain decoding: the median over the prompts."""
        return statistics.median(self.speedups)

    @property
    def speedups(self) -> list[float]:
        """Speed with drafting divided by the speed of plain decoding, one value per prompt, ascending."""
        return sorted(outputs.speedup for outputs in self.per_prompt)

    @property
    def usage(self) -> Usage:
        """Total usage of the outputs with drafting."""
        return _total_usage(self._drafted)

    @property
    def answers(self) -> list[DemoOutput]:
        """All outputs of all prompts."""
        answers = list[DemoOutput]()
        for outputs in self.per_prompt:
            answers += outputs.answers
        return answers

    @property
    def _drafted(self) -> list[DemoOutput]:
        answers = list[DemoOutput]()
        for outputs in self.per_prompt:
            answers += outputs.drafted
        return answers

    @property
    def _plain(self) -> list[DemoOutput]:
        answers = list[DemoOutput]()
        for outputs in self.per_prompt:
            answers += outputs.plain
        return answers

    @property
    def round_cost(self) -> float:
        """Mean time of a target's step in the outputs with drafting, divided by the mean time of a plain step."""
        return _step_s(self._drafted) / _step_s(self._plain)


def _step_s(answers: Sequence[DemoOutput]) -> float:
    usage = _total_usage(answers)
    return _elapsed_s(answers) / max(1, usage.num_rounds + usage.num_plain_steps)


def _elapsed_s(answers: Sequence[DemoOutput]) -> float:
    return sum(answer.elapsed_s for answer in answers)


def _total_usage(answers: Sequence[DemoOutput]) -> Usage:
    return total_usage([answer.usage for answer in answers])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing outputs with those of transformers' `generate` on the target's model."""

    num_answers: int
    num_tokens: int
    """Number of tokens of all compared outputs."""
    differences: list[dict[str, Any]]
    """The first difference of each output that differs, as a dict: answer (index of the output), position (of the token
    in the output, from 0), expected and found (token ids of transformers and of the output), top2_gap (difference of
    the two largest logits that transformers computes at this position)."""


def measure(
    asking: DemoRequests, prompt: str, speculation: Speculation, before: Callable[[str], str] | None
) -> PromptOutputs:
    """Return four outputs to a prompt, made in turn: by plain decoding, twice with drafting, and by plain decoding. If
    the machine's other load grows or falls meanwhile, it slows plain decoding and drafting about equally.

    asking: sends the requests. before: makes the prediction of the requests with drafting, as the text before an edit,
    from the first output; None = they have no prediction.
    """
    first = asking.answer(prompt, False)
    prediction = None
    if before is not None:
        prediction = before(first.text)
    drafted = asking.answer(prompt, speculation, prediction)
    again = asking.answer(prompt, speculation, prediction)
    return PromptOutputs((first, asking.answer(prompt, False)), (drafted, again))


def compare(
    model: str, max_tokens: int, repetition_penalty: float, answers: Sequence[DemoOutput], stop: StopFlag
) -> Comparison:
    """Generate outputs to the prompts of `answers` with transformers, in another process, and compare them with
    `answers`.

    model: path of the target's model. Raises OutriderError if the process fails, StopRequested after a stop.
    """
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
    """Return the value of `prompt` in each line of a JSONL file. Raises ConfigError naming the file and the
    wrong line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from None
    prompts = list[str]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_prompt_of(line, f"{path}, line {number}"))
    return prompts


def first_prompts(path: Path | None, count: int) -> list[str]:
    """Return the first `count` prompts of a JSONL file; path=None means the demo pair's file. Raises ConfigError if the
    file has no prompts.
    """
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
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
        raise ConfigError(f"{where} is {line[:80]!r}; {wanted}")
    prompt: str = item["prompt"]
    return prompt


def _await_compared(child: Child, stop: StopFlag) -> dict[str, Any]:
    give_up = time.monotonic() + REFERENCE_TIMEOUT_S
    while time.monotonic() < give_up:
        stop.check()
        has_ended = child.has_ended()
        if not child.events.empty():
            return child.events.get()
        if has_ended:
            break
        stop.wait(POLL_S)
    raise OutriderError(
        f"transformers' generate gave no result: {' / '.join(child.last_lines(5)) or 'it said nothing'}"
    )
