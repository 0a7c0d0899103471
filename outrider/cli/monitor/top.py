"""`outrider top`: draws a running system on one screen, again and again, from its HTTP endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.live import Live

from outrider.cli.console import errors_as_lines, screen_console, widen
from outrider.cli.monitor.series import Scrape, ScrapeInterval
from outrider.cli.monitor.top_screen import SystemView, screen
from outrider.cli.over_http import create_tls_context, gateway_url
from outrider.client import ConnectOptions
from outrider.wire.errors import Unavailable
from outrider.wire.transport.address import is_host_port

TIMEOUT_S = 2.0
"""Seconds to wait for the reply of a gateway or worker to one scrape. A process that does not reply in time is shown as
away."""


def top(
    gateway: Annotated[
        str, typer.Option("--gateway", "--address", help="Address of a gateway: of HTTP, gRPC or its metrics_port.")
    ] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds over which rates are measured.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, after one interval, and end.")] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM file of the CAs to trust; absent = the system's; implies https.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with a certificate to show; needs --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's key.")] = None,
) -> None:
    """Show a running system: workers, slots, KV cache, acceptance, tokens/s, where time goes, what is wrong.

    q or Ctrl-C ends it. If the output is not a terminal, it prints one frame.
    """
    with errors_as_lines():
        trust = create_tls_context(tls_ca, tls_cert, tls_key)
        url = gateway_url(gateway, ConnectOptions(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key))
        asyncio.run(_top(url, interval, once, trust))


async def _top(url: str, interval_s: float, once: bool, trust: ssl.SSLContext | bool) -> None:
    console = screen_console()
    # trust_env: a proxy to the outside reaches neither the gateway nor its workers.
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=trust) as http:
        reader = SystemReader(http, url)
        view = await reader.read()
        if view.away is not None:
            raise Unavailable(
                f"no gateway answers at {url}: {view.away}; start one with `outrider up`, or say --gateway HOST:PORT"
            )
        if once or not (console.is_terminal and sys.stdin.isatty()):
            await asyncio.sleep(interval_s)
            frame = screen(await reader.read(), console.width)
            if not console.is_terminal:
                widen(console, frame)
            console.print(frame)
            return
        with contextlib.suppress(asyncio.CancelledError), _ended_by_keys():
            await _watch(console, reader, view, interval_s)


async def _watch(console: Console, reader: SystemReader, view: SystemView, interval_s: float) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(view, console.width), refresh=True)
            await asyncio.sleep(interval_s)
            view = await reader.read()


@contextlib.contextmanager
def _ended_by_keys() -> Iterator[None]:
    """Context manager: during the block the key q and signals cancel the running task, and typed keys are not shown."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    keyboard = sys.stdin.fileno()
    assert task is not None

    def pressed() -> None:
        if os.read(keyboard, 64).lower() in (b"q", b""):
            task.cancel()

    before = termios.tcgetattr(keyboard)
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, pressed)
        for number in ends:
            loop.add_signal_handler(number, task.cancel)
        yield
    finally:
        loop.remove_reader(keyboard)
        for number in ends:
            loop.remove_signal_handler(number)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


class SystemReader:
    """Scrapes a gateway and its workers again and again. It keeps the last scrape of each, since rates need two."""

    def __init__(self, http: httpx.AsyncClient, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._http = http
        self._url = url
        self._clock = clock
        self._last: dict[str, Scrape] = {}
        """Last scrape of each process that replied the last time, by URL."""
        self._view: SystemView | None = None

    async def read(self) -> SystemView:
        """Scrape the gateway and all workers once more, and return a view of the results. If the gateway does not
        reply, the view has the reason and the previous scrapes.
        """
        try:
            metrics, ready, groups = await asyncio.gather(
                self._scrape(self._url), self._json("/readyz"), self._json("/sd")
            )
            readiness = _readiness(ready)
            members = _members(groups)
            workers = await asyncio.gather(*map(self._worker, members.values()))
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            self._last.clear()
            return self._without(_reason(error))
        spans = dict[str, ScrapeInterval]()
        for member, span in zip(members, workers, strict=True):
            if span is not None:
                spans[member] = span
        self._view = SystemView(self._url, time.time(), metrics, readiness, spans)
        return self._view

    def _without(self, reason: str) -> SystemView:
        last = self._view
        if last is None:
            empty = Scrape(self._clock(), {})
            last = SystemView(self._url, time.time(), ScrapeInterval(empty, empty), {})
        return SystemView(last.url, last.now_s, last.gateway, last.readiness, last.workers, away=reason)

    async def _worker(self, address: str) -> ScrapeInterval | None:
        if not is_host_port(address):
            return None
        try:
            return await self._scrape(f"http://{address}")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            self._last.pop(f"http://{address}", None)
            return None

    async def _scrape(self, url: str) -> ScrapeInterval:
        """Raises httpx.HTTPError, and ValueError where the reply has no metrics."""
        reply = (await self._http.get(f"{url}/metrics")).raise_for_status()
        now = Scrape.parse(reply.text, self._clock())
        before = self._last.get(url, now)
        self._last[url] = now
        return ScrapeInterval(before, now)

    async def _json(self, path: str) -> Any:
        return (await self._http.get(self._url + path)).json()


def _readiness(reply: Any) -> Mapping[str, Any]:
    """Return the JSON object of a reply of /readyz. Raises ValueError if it is not from a gateway."""
    if not isinstance(reply, dict):
        raise ValueError("/readyz is none of a gateway's")
    refused = reply.get("refused", [])
    if not isinstance(refused, list) or not all(isinstance(reason, str) for reason in refused):
        raise ValueError("/readyz is none of a gateway's")
    return reply


def _members(groups: Any) -> dict[str, str]:
    """Return the addresses of the workers' metrics by worker name, from the JSON of a reply of /sd.

    Raises ValueError, LookupError or TypeError if the reply is not from a gateway.
    """
    members = dict[str, str]()
    for group in groups:
        member = group["labels"]["member"]
        address = group["targets"][0]
        if not isinstance(member, str) or not isinstance(address, str):
            raise ValueError("/sd is none of a gateway's")
        members[member] = address
    return members


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.request.url.path} is answered with {error.response.status_code}"
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, httpx.HTTPError):
        return str(error) or type(error).__name__
    return "what answers there is no gateway"
