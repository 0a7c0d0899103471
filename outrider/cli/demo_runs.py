"""What the demo measures: the same greedy answers with and without speculation, and who else would give them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.client import Client, ConfigError, OutriderError, Round, Speculation, Usage
from outrider.client.types import total_usage
from outrider.wire.processes import LOOK_S, Child, StopFlag
from outrider.wire.settings.system import demo_model

_REFERENCE_TIMEOUT_S = 600.0
NUM_DRAFT_TOKENS = 5
"""Tokens drafted a round, fixed: the demo shows what drafts do, whether they pay on this machine or not."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One greedy answer."""

    prompt: str
    ids: list[int]
    usage: Usage
    elapsed_s: float
    """From the call to the last token, as the client saw it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The answers of one way to run."""

    answers: list[DemoAnswer]

    @property
    def usage(self) -> Usage:
        return total_usage([answer.usage for answer in self.answers])

    @property
    def tokens_per_s(self) -> float:
        return self.usage.num_completion_tokens / sum(answer.elapsed_s for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How answers compare with transformers' own `generate` on the target."""

    num_answers: int
    num_tokens: int
    differences: list[dict[str, Any]]
    """answer, position, expected, found, top2_gap."""


def answer(
    client: Client,
    prompt: str,
    max_tokens: int,
    stop: StopFlag,
    *,
    speculation: bool,
    show: Callable[[Round], None] = lambda round_: None,
) -> DemoAnswer:
    """Stream one greedy answer. Raises StopRequested between two rounds."""
    started = time.perf_counter()
    rounds: list[Round] = []
    with_drafts = Speculation(num_draft_tokens=NUM_DRAFT_TOKENS) if speculation else False
    with client.stream(prompt, max_tokens=max_tokens, temperature=0.0, speculation=with_drafts) as stream:
        for round_ in stream:
            stop.check()
            show(round_)
            rounds.append(round_)
    usage = rounds[-1].usage if rounds else None
    if usage is None:
        raise OutriderError("the gateway ended the stream without its last message")
    return DemoAnswer(prompt, list(_ids(rounds)), usage, time.perf_counter() - started)


def run_arms(
    client: Client, prompts: Sequence[str], max_tokens: int, stop: StopFlag, done: Callable[[], None]
) -> tuple[Arm, Arm]:
    """Return the answers (with, without) speculation, interleaved so that what else the machine does falls on both."""
    arms: dict[bool, list[DemoAnswer]] = {True: [], False: []}
    for index, prompt in enumerate(prompts):
        for speculation in (True, False) if index % 2 == 0 else (False, True):
            arms[speculation].append(answer(client, prompt, max_tokens, stop, speculation=speculation))
            done()
    return Arm(arms[True]), Arm(arms[False])


def compare(model: str, max_tokens: int, answers: Sequence[DemoAnswer], stop: StopFlag) -> Comparison:
    """Have a separate process generate from the prompts with transformers, and compare. Ends the process."""
    task = {
        "model": model,
        "max_tokens": max_tokens,
        "prompts": [one.prompt for one in answers],
        "answers": [one.ids for one in answers],
    }
    args = [sys.executable, "-m", "outrider.engine.reference_generate"]
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
    give_up = time.monotonic() + _REFERENCE_TIMEOUT_S
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
