"""The SDK without a service: `LLM` starts a system beside the program, asks it, and ends it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any

from outrider.client.aio import AsyncClient
from outrider.client.request import GenerateOptions, Message
from outrider.client.sync import LoopThread
from outrider.client.types import Completion
from outrider.wire.errors import ConfigError, InvalidRequest, OutriderError, Unavailable

Asked = tuple[str | None, GenerateOptions]
"""What an answer is to: a text, or what is in the options."""
Sampling = GenerateOptions | Sequence[GenerateOptions]
"""How answers are made: of all, or one of each prompt."""


class LLM:
    """A target and its draft, served to this program alone: started here, ended by `close`, at the end of a `with`,
    when it is dropped, and with the program, however that ends.

    The workers and a gateway are processes of their own, on ports of this machine alone; threads may share an LLM.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Mapping[str, Any],
        draft: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        """Return when a call would be answered.

        target, draft: a model's folder, or all settings of the worker, "model" among them. progress: show on stderr how
        the start goes on. settings: those that target and draft both have, such as dtype, and a gateway's, such as
        num_draft_tokens. Raises ConfigError for what cannot be started so, Unavailable for a part that failed.
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
            # What lies in the user's folder under one of our names is none of our modules.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            process_group=0,  # Ctrl-C is for the program, which ends it
        )
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())
        try:
            self._write(line)
            ready = self._event()
            self._max_running = int(ready["max_running"])
            self.address: str = ready["address"]
            """host:port of the gateway's gRPC server, for a client of this program's own."""
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
        """End what runs, and the system; return when no process of it is left. Idempotent."""
        self._stop_client()
        self._finalizer()

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Return the answer to each prompt, in their order: texts, or token ids. As many run at once as the gateway
        takes. Raises as `Client.generate` does: the first error of any, and the others are cancelled.
        """
        return self._ask([_asked(prompt) for prompt in _prompts(prompts)], sampling)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Return the answer to each chat, or to the only one, as `generate` does."""
        return self._ask([(None, GenerateOptions(messages=chat)) for chat in _chats(messages)], sampling)

    def _ask(self, asked: Sequence[Asked], sampling: Sampling | None) -> list[Completion]:
        own = zip(asked, _options(sampling, len(asked)), strict=True)
        try:
            return self._thread.run(self._answers([(text, {**each, **more}) for (text, more), each in own]))
        except Unavailable:
            if self._process.poll() is not None:
                self._event()  # it says why
            raise

    async def _answers(self, requests: Sequence[Asked]) -> list[Completion]:
        room = asyncio.Semaphore(max(1, self._max_running // _most_choices(requests)))

        async def answer(text: str | None, options: GenerateOptions) -> Completion:
            async with room:
                return await self._core.generate(text, **options)

        tasks = [asyncio.create_task(answer(*request)) for request in requests]
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

    def _event(self) -> dict[str, Any]:
        """Wait for "ready", and return it. Raises what it has failed for."""
        assert self._process.stdout is not None, "it was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"the system ended, with exit code {self._process.wait()}; start another LLM")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "ready":
            return event
        kind: type[OutriderError] = ConfigError if event["is_config"] else Unavailable
        raise kind("\n  ".join([event["message"], *event["log_lines"]]))


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """End a system, and wait for its end, in the process that started it."""
    if os.getpid() != owner:
        return  # it was forked, and the system is not its own
    if process.poll() is None:
        process.terminate()
    while True:
        try:
            process.wait()
            break
        except KeyboardInterrupt:
            process.terminate()  # a second time: at once
    if process.stdout is not None:
        process.stdout.close()


def _prompts(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> Sequence[Any]:
    if not isinstance(prompts, str) and not _is_list(prompts):
        raise InvalidRequest(
            f"prompts is {repr(prompts)[:100]}, must be a text, a list of token ids, or a list of such", param="prompts"
        )
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(each, int) for each in prompts))
    return [prompts] if is_one else prompts


def _chats(messages: Any) -> Sequence[Any]:
    """Return each chat: what is no list of lists is one, or none, as is said when it is sent."""
    return messages if _is_list(messages) and all(map(_is_list, messages)) else [messages]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _asked(prompt: Any) -> Asked:
    if isinstance(prompt, str):
        return prompt, GenerateOptions()
    if not _is_list(prompt):
        raise InvalidRequest(
            f"prompts holds {repr(prompt)[:100]}, must hold texts or lists of token ids", param="prompts"
        )
    return None, GenerateOptions(prompt_ids=prompt)


def _options(sampling: Any, num_prompts: int) -> Sequence[Any]:
    """Return those of each prompt. Raises InvalidRequest."""
    if sampling is None or isinstance(sampling, Mapping):
        return [{} if sampling is None else sampling] * num_prompts
    if not _is_list(sampling) or not all(isinstance(each, Mapping) for each in sampling):
        raise InvalidRequest(
            f'sampling is {repr(sampling)[:100]}, must be a dict such as {{"max_tokens": 16}}, or a list of such',
            param="sampling",
        )
    if len(sampling) != num_prompts:
        raise InvalidRequest(
            f"sampling has {len(sampling)} entries for {num_prompts} prompts; give one for each, or one for all",
            param="sampling",
        )
    return list(sampling)


def _most_choices(requests: Sequence[Asked]) -> int:
    """Return the most answers to one prompt. What is no such number is refused where it is sent."""
    counts: list[Any] = [options.get("n") for _, options in requests]
    return max((1, *(int(n) for n in counts if isinstance(n, Integral))))
