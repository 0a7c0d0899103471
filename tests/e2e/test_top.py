"""`outrider top` under a pseudo-terminal, beside real answers: what a person sees, and how it is left."""

import re
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.forked import REPO, clean_environment
from tests.stack import Stack
from tests.terminal import terminal

OUTRIDER = (sys.executable, "-m", "outrider.cli")
ROUND = re.compile(r"held for drafts +\d.* %\n +verify +\d.* %\n +overhead +\d.* %")
MOVING = re.compile(r"tokens/s [1-9]\d*\.\d  tokens per target pass [1-9]")
WORKER = r"{0}-0 +serving +{0} cpu +\d+ % +\d/64 +\d+/2048 +\d+\.\d"
PAIR = re.compile(r"^target +draft +\d+ % +[1-9]\.\d\d +[1-9]\d*\.\d ", re.MULTILINE)


@pytest.fixture
def answers(stack: Stack) -> Iterator[list[str]]:
    """Gateways that get one answer after another, as long as a test runs."""
    urls, done = [stack.http], threading.Event()
    body = {"prompt": "def f(x):", "max_tokens": 64, "speculation": {"num_draft_tokens": 5}}

    def ask() -> None:
        with httpx.Client(timeout=60) as http:
            while not done.is_set():
                for url in list(urls):
                    http.post(f"{url}/v1/completions", json=body)

    thread = threading.Thread(target=ask)
    thread.start()
    yield urls
    done.set()
    thread.join()


def test_a_person_sees_the_system_at_work_and_gets_the_terminal_back(stack: Stack, answers: list[str]) -> None:
    args = ("top", "--gateway", stack.http, "--interval", "0.5")
    with terminal(*OUTRIDER, *args, env=clean_environment(), cwd=str(REPO)) as shown:
        text = shown.wait_for(MOVING, ROUND)
        assert re.match(r"outrider http://\S+  ready  up \d+ ", text)
        for role in ("target", "draft"):
            assert re.search(WORKER.format(role), text), text
        assert PAIR.search(text), text
        assert re.search(r"running [01]  waiting 0  answers/s \d", text), text
        assert re.search(r"drafts lay ready \d+ % of the steps", text), text
        assert not shown.is_as_before  # keys come one by one
        shown.press("q")
        assert shown.wait() == 0
        assert shown.is_as_before
        assert shown.output.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))  # the shell's screen and cursor
