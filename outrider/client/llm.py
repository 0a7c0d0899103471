"""`LLM`, the SDK where no gateway runs yet: it starts workers and a gateway, sends requests to them, and ends them.

The processes are started by `python -m outrider.cli.offline`. It reads the settings as one line of JSON from stdin, and
writes one line of JSON to stdout: the event "ready", or an event with the error.
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
from outrider.client.generate_options import GenerateOptions, Message
from outrider.client.llm_inputs import Request, Sampling, max_choices, read_chats, read_prompts, read_sampling
from outrider.client.sync import LoopThread
from outrider.client.types import Completion
from outrider.wire.errors import ConfigError, Unavailable


class LLM:
    """A target and its draft, run for this program only. Use it as `with`; several threads may share one LLM.

    The LLM starts the workers and the gateway as separate processes, which listen on this machine only. They end with
    `close`, at the end of the `with`, when the LLM is garbage-collected, and when the program ends, even by a crash.
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

        target, draft: a model's folder or hub id, or a mapping with all settings of the worker, including "model".
        draft=None means no draft worker. progress: show the progress of the start on stderr. settings: settings for
        both target and draft, such as dtype, and settings of the gateway, such as num_draft_tokens.

        Raises ConfigError for settings that cannot be used, and Unavailable if a process fails.
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
        """End every call in progress, stop workers and gateway, and wait until they have ended. Idempotent."""
        self._stop_client()
        self._finalizer()

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Return the completion of each prompt, in the order of the prompts.

        prompts: one text, one list of token ids, or a list of texts and lists of token ids. sampling: one set of
        options for all prompts, or a list with one set of options per prompt. The gateway runs as many requests at once
        as it admits; the others wait. Raises the errors of `Client.generate`; the first error cancels the other
        requests.
        """
        return self._generate(read_prompts(prompts), sampling)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Return the completion of each chat, in the order of the chats.

        messages: one chat (a list of messages), or a list of chats. sampling: options for all chats, or a list with one
        set of options per chat. Raises the errors of `Client.generate`; the first error cancels the other requests.
        """
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
