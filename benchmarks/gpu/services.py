"""Workers as plain processes, and a gateway without HTTP in this process: what the kit serves with.

Nothing of Ray, FastAPI or a network beyond 127.0.0.1: the workers are `python -m target_service` and `draft_service`,
and the rounds are those of the gateway's own coordinator.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.gpu.bench import REPO
from gateway.coordinator import Coordinator
from gateway.generation import ChoiceUsage, GenerationRequest, RoundOutput, SpeculationOptions
from gateway.workers.membership import from_config
from gateway.workers.named_workers import NamedWorkers
from gateway.workers.worker_pools import Pools
from outrider.wire.processes.processes import Child
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.metrics import GatewayMetrics

PLAIN = SpeculationOptions(enabled=False)
PROMPTS = (
    "def fibonacci(n):\n",
    "The city of Paris is",
    "Once upon a time there was a",
    '{"name": "Ada", "born": 1815, "languages": [',
    "Q: What is the boiling point of water?\nA:",
    "import os\nimport sys\n\n",
    "To make bread you need",
    "The following table lists",
)
"""Beginnings of texts like those of the demo pair's training."""


class WorkerFailed(RuntimeError):
    """Raised when a worker does not come up; the message ends with the last lines of its log."""


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as a worker's command line has them; True is a flag without a value."""
    args = []
    for name, value in settings.items():
        args.append(f"--{name.replace('_', '-')}")
        if value is not True:
            args.append(str(value))
    return args


class Worker:
    """A worker process."""

    def __init__(self, role: str, **settings: Any) -> None:
        """Start `python -m <role>_service` with these settings; it loads while the caller goes on."""
        self.role, self.began_s = role, time.monotonic()
        args = [sys.executable, "-m", f"{role}_service", "--port", "0", *flags(settings)]
        path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])  # PYTHONSAFEPATH leaves out the folder
        self._child = Child(role, args, env={**os.environ, "PYTHONPATH": path})
        self.load_s = 0.0
        """Seconds from its start until it could be called."""

    def address(self) -> str:
        """Wait until it can be called; return where. Raises WorkerFailed."""
        while True:
            if not self._child.events.empty():
                event = self._child.events.get()
                if event.get("event") == "ready":
                    self.load_s = time.monotonic() - self.began_s
                    return str(event["address"])
            elif self._child.has_ended() and self._child.events.empty():
                code, lines = self._child.returncode, "\n".join(self._child.last_lines(12))
                raise WorkerFailed(f"the {self.role} ended with exit code {code} before it could be called:\n{lines}")
            else:
                time.sleep(0.02)

    def log(self, num_lines: int = 200) -> list[str]:
        return self._child.last_lines(num_lines)

    def stop(self) -> None:
        self._child.stop(grace_s=0.0)
        self._child.close()


@contextlib.contextmanager
def workers() -> Iterator[list[Worker]]:
    """Yield a list of workers; all that it then holds are ended."""
    started: list[Worker] = []
    try:
        yield started
    finally:
        for worker in started:
            worker.stop()


@dataclass
class Answer:
    """One answer and its cost."""

    ids: list[int] = field(default_factory=list)
    usage: ChoiceUsage = field(default_factory=ChoiceUsage)
    first_token_s: float = 0.0
    seconds: float = 0.0


class Gateway:
    """A gateway that is called in process."""

    def __init__(self, pools: Pools, coordinator: Coordinator) -> None:
        self._pools, self._coordinator = pools, coordinator
        self._num_requests = 0

    def refusals(self) -> list[str]:
        return self._pools.refusals()

    async def answer(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        speculation: SpeculationOptions = PLAIN,
        on_output: Callable[[RoundOutput], None] = lambda output: None,
        **sampling: Any,
    ) -> Answer:
        """Return the answer to a prompt; greedy, to its last token, unless `sampling` says otherwise.

        on_output: called with each round's output as it comes.
        """
        self._num_requests += 1
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
        model = self._coordinator.models()[0].id
        request = GenerationRequest(f"gpu-{self._num_requests}", model, tuple(prompt_ids), params, (), speculation)
        answer, began_s = Answer(), time.monotonic()
        async with self._coordinator.admit(model, 1) as answers:
            answers.start((request,))
            async for _, output in answers.stream():
                if not answer.ids and output.tokens:
                    answer.first_token_s = time.monotonic() - began_s
                answer.ids += [token.id for token in output.tokens]
                answer.usage = output.usage or answer.usage
                on_output(output)
        answer.seconds = time.monotonic() - began_s
        return answer


@contextlib.asynccontextmanager
async def gateway(target: str, draft: str | None = None, **settings: Any) -> AsyncIterator[Gateway]:
    """Yield a gateway once its workers are connected."""
    pools = Pools(GatewayConfig(target=target, draft=draft, **settings), GatewayMetrics())
    source = NamedWorkers(from_config(pools.config), pools.update, pools.is_connected)
    try:
        await source.wait_first(0.0)
        await pools.wait_ready()
        await pools.wait_drafts()
        yield Gateway(pools, Coordinator(pools))
    finally:
        await source.close()
        await pools.close()


def prompt_ids(model: Path | str, num: int) -> list[list[int]]:
    """Return the tokens of the first PROMPTS, from the first again when there are fewer."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    return [tokenizer.encode(PROMPTS[index % len(PROMPTS)]).ids for index in range(num)]
