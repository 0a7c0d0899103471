"""`outrider top` under a pseudo-terminal, beside real answers: what a person sees, and how it is left."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from tests.forked import REPO, clean_environment
from tests.stack import Stack, gateway_beside
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


def test_a_gateway_that_goes_is_said_to_be_gone_until_it_is_back(stack: Stack) -> None:
    with gateway_beside(stack) as gateway:
        args = ("top", "--gateway", str(gateway.ready["http"]), "--interval", "0.1")
        with terminal(*OUTRIDER, *args, env=clean_environment(), cwd=str(REPO)) as shown:
            shown.wait_for("  ready  up", "target-0")
            gateway.kill()
            shown.wait_for("  gone  up", "the gateway is gone (All connection attempts failed)", "target-0")
            back = gateway.again()
            try:
                shown.wait_for("  ready  up", "target-0", without="gone")
            finally:
                back.stop()
            shown.press("\x03")
            assert shown.wait() == 0
            assert shown.is_as_before
            assert b"Traceback" not in shown.output


def test_off_a_terminal_it_prints_one_frame(stack: Stack) -> None:
    made = CliRunner().invoke(app, ["top", "--gateway", stack.http, "--interval", "0.1"])
    assert made.exit_code == 0
    assert re.search(WORKER.format("target"), made.stdout) and "\x1b" not in made.stdout
    assert "…" not in made.stdout and re.search("between tokens p50 .* p95 ", made.stdout)


@pytest.mark.parametrize(
    ("gateway", "message"),
    [
        ("127.0.0.1:9", "no gateway answers at http://127.0.0.1:9: All connection attempts failed; start one with"),
        ("ftp://here", "--gateway is 'ftp://here', must look like http://HOST:PORT"),
    ],
)
def test_a_gateway_that_was_never_there_is_named_in_one_line(gateway: str, message: str) -> None:
    made = CliRunner().invoke(app, ["top", "--gateway", gateway])
    assert made.exit_code == 1
    assert made.stdout == "" and made.stderr.startswith(f"error: {message}")


def test_the_address_of_grpc_leads_to_http(stack: Stack) -> None:
    made = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", "--gateway", stack.grpc])
    assert made.exit_code == 0, made.stderr
    assert stack.http in made.stdout


def test_what_is_no_gateway_is_said_to_be_none(stack: Stack) -> None:
    target = str(stack.target.ready["address"])
    made = CliRunner().invoke(app, ["top", "--gateway", target])
    assert made.exit_code == 1
    assert f"no gateway answers at http://{target}" in made.stderr
