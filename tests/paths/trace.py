"""One streaming chat through the demo pair, traced."""

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.forked import REPO
from tests.stack import DEMO_DRAFT, DEMO_TARGET, Process

IDLE_S = 4.0
"""Seconds watched without a request: longer than the pauses of everything that runs by itself."""
AFTER_S = 0.5
"""Seconds in which a request's last messages arrive once its answer has ended."""
WRITE_S = 20.0
CHAT = {
    "model": "",
    "messages": [{"role": "user", "content": "Tell me a story about a boat."}],
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 7,
    "stream": True,
}

Entered = dict[str, float]
"""Seconds since the request was sent, by file below the repository, in the order of first entry."""


@dataclass
class Traced:
    process: Process
    folder: Path
    module: str
    num_windows: int = 0

    def window(self) -> dict[str, tuple[str, float]]:
        """End the window; return file and time of each function's first entry in it."""
        self.process.popen.send_signal(signal.SIGUSR2)
        path = self.folder / f"{self.module}.{self.num_windows}.json"
        self.num_windows += 1
        deadline = time.monotonic() + WRITE_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.module} wrote no trace in {WRITE_S} s")
            time.sleep(0.02)
        found: dict[str, tuple[str, float]] = json.loads(path.read_text())
        return found


@contextmanager
def running() -> Iterator[dict[str, Traced]]:
    """The three services, by module, each traced from its first line on."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, traced = Path(name), dict[str, Traced]()

        def start(module: str, *args: str) -> str:
            process = Process("tests.paths.traced", [name, module, *args], stderr_path=folder / f"{module}.log")
            stack.callback(process.stop)
            traced[module] = Traced(process, folder, module)
            return "" if module == "gateway" else process.address

        target = start("target_service", "--model", DEMO_TARGET)
        draft = start("draft_service", "--model", DEMO_DRAFT)
        start("gateway", "--target", target, "--draft", draft, "--port", "0", "--grpc-port", "0")
        yield traced


def chat(url: str) -> None:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    if answer.status_code != 200 or lines[-1] != "data: [DONE]":
        raise RuntimeError(f"the chat was answered with {answer.status_code}: {lines[-1:]}")


def trace_chat() -> dict[str, Entered]:
    """Return what one chat entered, by module.

    A second of two is traced, so that nothing is counted which happens once in a process. A function counts unless it
    also runs while nobody asks for anything: health checks, load reports and the like.
    """
    with running() as traced:
        url = f"http://{traced['gateway'].process.ready['http']}"
        CHAT["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        chat(url)
        time.sleep(AFTER_S)
        for service in traced.values():
            service.window()
        time.sleep(IDLE_S)
        idle = {module: service.window() for module, service in traced.items()}
        sent_s = time.monotonic()
        chat(url)
        time.sleep(AFTER_S)
        return {
            module: files(sent_s, service.window(), set(idle[module]) if module in idle else set())
            for module, service in traced.items()
        }


def files(sent_s: float, functions: dict[str, tuple[str, float]], idle: set[str]) -> Entered:
    """Files of this repository, tests apart, by the first entry of one of their functions."""
    first = dict[str, float]()
    for function, (name, entered_s) in functions.items():
        if function not in idle and name.startswith(f"{REPO}/") and "/tests/" not in name and "/.venv/" not in name:
            path = name.removeprefix(f"{REPO}/")
            first[path] = min(first.get(path, entered_s), entered_s)
    return {path: first[path] - sent_s for path in sorted(first, key=lambda path: first[path])}
