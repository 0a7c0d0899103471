"""Streams under way while a part is killed, and what became of them."""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tests.compose.engine import REPO, get, on_ports
from tests.compose.streams import Answer

METRICS = "http://127.0.0.1:9000"
POLL_S = 0.25
ANSWERS_S = 400.0
STALL_S = 0.75
"""Without a drafted token under load for this long: drafts have stopped."""


@dataclass(frozen=True)
class Load:
    """`num_lines` streams at once, of `num_tokens` each."""

    url: str
    num_lines: int
    num_tokens: int


def streams(load: Load, *more: str) -> subprocess.Popen[str]:
    numbers = (str(load.num_lines), str(load.num_tokens))
    command = [*on_ports(), sys.executable, "-m", "tests.compose.streams", load.url, *numbers, *more]
    return subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answers_of(printed: str) -> list[Answer]:
    return [Answer(**json.loads(line)) for line in printed.splitlines()]


def undisturbed(load: Load) -> dict[int, str]:
    """The text of each prompt. Raises RuntimeError naming what went wrong."""
    process = streams(load, "once")
    try:
        printed, _ = process.communicate(timeout=ANSWERS_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{load.num_lines} answers of {load.num_tokens} tokens took over {ANSWERS_S:g} s") from None
    finally:
        process.kill()
    found = answers_of(printed)
    errors = [answer.error for answer in found if answer.error is not None]
    if errors or len(found) != load.num_lines:
        raise RuntimeError(f"{len(found)} of {load.num_lines} answers without any fault; errors: {errors[:3]}")
    return {answer.prompt: answer.text for answer in found}


class DraftWatch:
    """Polls the gateway's counter of drafted tokens, on a thread of its own."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "DraftWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def moving(self) -> bool:
        """Drafted tokens came within the last polls."""
        return len(self._seen) > 3 and self._seen[-1][1] > self._seen[-4][1]

    def stalls(self, since: float) -> list[tuple[float, float]]:
        """(beginning, end) of the times without a drafted token, after `since`."""
        rises = [self._seen[0][0]]
        rises += [at for (_, before), (at, now) in itertools.pairwise(self._seen) if now > before]
        pairs = itertools.pairwise(rises)
        return [(begin, end) for begin, end in pairs if end - begin > STALL_S and end > since]

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            status, text = get(f"{METRICS}/metrics", 5)
            if status != 200:
                continue
            families = text_string_to_metric_families(text)
            samples = [one for family in families for one in family.samples if one.name == "spec_draft_tokens_total"]
            self._seen.append((time.time(), sum(one.value for one in samples)))


@dataclass
class Outcome:
    """Of one fault."""

    fault: str
    at: float
    """When; seconds of the wall clock, as all times here."""
    answers: list[Answer] = field(default_factory=list)
    draft_stalls: list[tuple[float, float]] = field(default_factory=list)
    settled: bool = False
    """Everything was healthy and drafting again in time."""

    def hit(self) -> list[Answer]:
        """Those that had tokens before the fault and ended after it."""
        return [one for one in self.answers if one.times and one.times[0] < self.at < one.ended]

    def pauses(self) -> list[float]:
        """Of each stream that was hit: the longest time without a token, from the fault on; seconds, in order."""
        found = []
        for answer in self.hit():
            pairs = itertools.pairwise(answer.times)
            found.append(max((after - max(before, self.at) for before, after in pairs if after > self.at), default=0.0))
        return sorted(found)

    def without_drafts(self) -> float:
        """Seconds from the fault to the last return of drafted tokens."""
        return max((end - self.at for _, end in self.draft_stalls), default=0.0)


def under_load(
    load: Load, name: str, fault: Callable[[], None], settled: Callable[[], bool], timeout_s: float
) -> Outcome:
    """Streams before, during and after `fault`; they end once `settled`, or after timeout_s."""
    process = streams(load)
    try:
        return _under_load(process, name, fault, settled, timeout_s)
    finally:
        process.kill()


def _under_load(
    process: subprocess.Popen[str], name: str, fault: Callable[[], None], settled: Callable[[], bool], timeout_s: float
) -> Outcome:
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.extend(process.stdout or ()), daemon=True)
    reader.start()
    with DraftWatch() as watch:
        wait_until(watch.moving, 30)
        time.sleep(2)
        outcome = Outcome(name, time.time())
        fault()
        time.sleep(3)  # a health check that has not looked yet still says healthy
        outcome.settled = wait_until(lambda: settled() and watch.moving(), timeout_s)
        time.sleep(2)
        outcome.draft_stalls = watch.stalls(outcome.at)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(ANSWERS_S)
    reader.join(10)
    outcome.answers = answers_of("".join(printed))
    return outcome


def wait_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether `ready` came true within the time."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        if ready():
            return True
        time.sleep(0.5)
    return False
