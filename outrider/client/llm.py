"""`LLM`, the SDK without a service: it starts workers and a gateway, sends requests to them, and ends them.

The processes are started through `python -m outrider.cli.offline`: it reads one line of JSON, the settings, and writes
one, an event: "ready", or what failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from outrider.client.aio import AsyncClient
from outrider.client.llm_inputs import Request, Sampling, max_choices, read_chats, read_prompts, read_sampling
from outrider.client.options import GenerateOptions, Message
from outrider.client.sync import LoopThread
from outrider.client.types import Completion
from outrider.wire.errors import ConfigError, Unavailable


class LLM:
    """A target and its draft, served to this program alone. Use as `with`; threads may share one.

    Workers and gateway are processes of their own that listen on this machine alone. They start with the LLM and end
    with `close`, at the end of the `with`, when the LLM is garbage-collected, and when the program ends, however it
    ends.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Mapping[str, Any],
        draft: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        """Start the system and wait until it can serve requests.

        target, draft: a model's folder, or a mapping of all settings of the worker, "model" among them; draft None = no
        draft worker. progress: show the progress of the start on stderr. settings: settings that target and draft
        share, such as dtype, and settings of the gateway, such as num_draft_tokens.

        Raises ConfigError for settings that cannot be used, Unavailable for a process that failed.
        """
        task = {"parent": os.getpid(), "target": target, "draft": draft, "settings": settings, "progress": progress}
        try:
            line = json.dumps(task, default=os.fspath)
        except TypeError as error:
            raise ConfigError(f"the settings of an LLM cannot be passed on: {error}") from None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider.cli.offline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Without it a file in the user's folder would be imported in place of our module of that name.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            process_group=0,  # Ctrl-C reaches this program alone, which then ends the system
        )
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())
        try:
            self._write(line)
            ready = self._read_event()
            self._max_running = int(ready["max_running"])
            self.address: str = ready["address"]
            """host:port of the gateway's gRPC server, for further clients."""
            self._core = AsyncClient(self.address, timeout_s=None)
            self._thread = LoopThread(self._core, "LLM")
            self._stop_client = weakref.finalize(self, self._thread.stop)
        except BaseException:
            self._finalizer()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every call in progress and the system, and wait until its processes have ended. Idempotent."""
        self._stop_client()
        self._finalizer()

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Return the completion of each prompt, in their order.

        prompts: a text, a list of token ids, or a list of those. sampling: options of all prompts, or a list with those
        of each. As many requests run at once as the gateway admits. Raises as `Client.generate` does: the first error
        cancels the other requests.
        """
        return self._generate(read_prompts(prompts), sampling)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Return the completion of each chat, as `generate` does. messages: one chat, or a list of chats."""
        return self._generate(read_chats(messages), sampling)

    def _generate(self, inputs: Sequence[Request], sampling: Sampling | None) -> list[Completion]:
        requests = list[Request]()
        for (text, own_options), options in zip(inputs, read_sampling(sampling, len(inputs)), strict=True):
            requests.append((text, {**options, **own_options}))
        try:
            return self._thread.run(self._generate_all(requests))
        except Unavailable:
            if self._process.poll() is not None:
                self._read_event()  # raises the reason for which the system ended
            raise

    async def _generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        limit = asyncio.Semaphore(max(1, self._max_running // max_choices(requests)))

        async def generate(text: str | None, options: GenerateOptions) -> Completion:
            async with limit:
                return await self._core.generate(text, **options)

        tasks = [asyncio.create_task(generate(text, options)) for text, options in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        try:
            with self._process.stdin as pipe:
                pipe.write(line + "\n")
        except BrokenPipeError:
            raise Unavailable(f"the system ended at once, with exit code {self._process.wait()}") from None

    def _read_event(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"the system ended, with exit code {self._process.wait()}; start another LLM")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "ready":
            return event
        message = "\n  ".join([event["message"], *event["log_lines"]])
        if event["is_config"]:
            raise ConfigError(message)
        raise Unavailable(message)


def _end(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked process: the system is its parent's
    if process.poll() is None:
        process.terminate()
    while True:
        try:
            process.wait()
            break
        except KeyboardInterrupt:
            process.terminate()  # a second signal ends it at once
    if process.stdout is not None:
        process.stdout.close()
