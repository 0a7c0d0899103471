"""`Client`, the blocking form of the SDK: it runs an `AsyncClient` on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar, Unpack

from outrider.client.aio import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, AsyncClient
from outrider.client.connect import ConnectOptions
from outrider.client.generate_options import GenerateOptions
from outrider.client.retry import RetryPolicy
from outrider.client.stream import RoundStream
from outrider.client.transport import Transport, check_fork
from outrider.client.types import Completion, Model, Round
from outrider.wire.errors import OutriderError

Result = TypeVar("Result")
_JOIN_S = 5.0
"""Seconds that `LoopThread.stop` waits for the end of its thread."""


class ClosedError(OutriderError):
    """The client was closed before or during the call."""


class LoopThread:
    """A thread with an event loop that runs the coroutines of one `AsyncClient` until `stop`.

    core: the AsyncClient. owner: name, in error messages, of the object that uses the thread, such as "client". The
    thread keeps no reference to that object, so that it can be garbage-collected.
    """

    def __init__(self, core: AsyncClient, owner: str = "client") -> None:
        self._core = core
        self._owner = owner
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stopped = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="outrider-client", daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._ready.set()
        await self._wake.wait()
        await self._core.aclose()

    @property
    def is_of_another_process(self) -> bool:
        """Whether this process was forked from the process that started the thread. A forked process does not have the
        thread, so nothing can run on it.
        """
        return os.getpid() != self._pid

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the thread and return its result. If the calling thread is interrupted (Ctrl-C), the
        coroutine is cancelled.

        Raises ClosedError after or during `stop`, and OutriderError in a forked process.
        """
        if self.is_of_another_process:
            coroutine.close()
            check_fork()  # raises where a new client would not work either
            raise OutriderError(f"this {self._owner} was made before this process was forked; make a new one here")
        future = Future[Result]()  # made before the call begins, so that an interrupt at any time finds it
        try:
            with self._lock:
                if self._stopped:
                    coroutine.close()
                    raise ClosedError(f"this {self._owner} is closed; make a new one")
                self._loop.call_soon_threadsafe(self._start, coroutine, future)
            return future.result()
        except CancelledError:
            raise ClosedError(f"the {self._owner} was closed while this call was in progress") from None
        except BaseException:
            future.cancel()
            raise

    def _start(self, coroutine: Coroutine[Any, Any, Result], future: Future[Result]) -> None:
        if future.cancelled():
            coroutine.close()
            return
        task = self._loop.create_task(coroutine)

        def cancel_task(_: Future[Result]) -> None:
            if future.cancelled() and not task.done():
                self._loop.call_soon_threadsafe(task.cancel)

        def settle(_: asyncio.Task[Result]) -> None:
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            elif future.set_running_or_notify_cancel():
                future.set_result(task.result())

        task.add_done_callback(settle)
        future.add_done_callback(cancel_task)

    def stop(self) -> None:
        """End the thread and close its AsyncClient. Idempotent; any thread may call it.

        Waits at most 5 s for the thread's end, except on the thread itself, where a garbage collection may call it.
        """
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._wake.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)


class Client:
    """Blocking client of one gateway, for code without an event loop. Use it as `with`; several threads may share it.

    address: host:port, or a URL of the gateway's HTTP server. timeout_s: deadline of a call in seconds, retries
    included, unless the call has a `timeout_s`; None = no deadline. retries: maximum number of attempts after the
    first, or a RetryPolicy. transport: replaces gRPC; `address` and `connect` are then not used. connect: TLS, API key
    and pings of the connection.

    Every method raises subclasses of `OutriderError`. A client that is garbage-collected closes itself.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int | RetryPolicy = 2,
        transport: Transport | None = None,
        **connect: Unpack[ConnectOptions],
    ) -> None:
        self._core = AsyncClient(address, timeout_s=timeout_s, retries=retries, transport=transport, **connect)
        self._thread = LoopThread(self._core)
        self._finalizer = weakref.finalize(self, self._thread.stop)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every call in progress. Idempotent."""
        self._finalizer()

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """Return the completion of a request. Give one of `prompt`, `prompt_ids` and `messages`."""
        return self._thread.run(self._core.generate(prompt, **options))

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> SyncRoundStream:
        """Return a stream of the request's rounds, each as soon as it is made. Give one of `prompt`, `prompt_ids` and
        `messages`. Arguments are checked here; the call to the gateway starts when the first round is read.
        """
        return SyncRoundStream(self, self._thread, self._core.stream(prompt, **options))

    def models(self) -> tuple[Model, ...]:
        """Return the models that the gateway serves now."""
        return self._thread.run(self._core.models())


class SyncRoundStream(Iterator[Round]):
    """Blocking iterator of the rounds of a request, those of all choices interleaved. Only one thread may read it.

    Use it with `with` and `for`. Leaving the `with` block cancels the call if it still runs.
    """

    def __init__(self, client: Client, thread: LoopThread, stream: RoundStream) -> None:
        self._client = client  # keeps it alive: a client that is garbage-collected ends its streams
        self._thread = thread
        self._stream = stream

    def __enter__(self) -> SyncRoundStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> Round:
        round_ = self._thread.run(self._next_round())
        if round_ is None:
            raise StopIteration
        return round_

    async def _next_round(self) -> Round | None:
        return await anext(self._stream, None)

    def close(self) -> None:
        """Cancel the call if it runs. Idempotent. Does nothing in a forked process, whose parent runs the call."""
        if self._thread.is_of_another_process:
            return
        with suppress(ClosedError):
            self._thread.run(self._stream.aclose())
