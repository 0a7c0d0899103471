"""The gateway's front ends before a scripted generator: called in this process, and served on free ports."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx
from prometheus_client import CollectorRegistry

from gateway.admission.admission import Admission
from gateway.api.app import create_app
from gateway.api.grpc_api import GenerationServicer
from gateway.api.http_server import BACKLOG, HttpServer, bind
from outrider.v1 import gateway_pb2_grpc
from outrider.wire.transport.serving import start_server
from tests.service.scripted_generator import ScriptedGenerator, config


def admission_of(generator: ScriptedGenerator, **settings: object) -> Admission:
    return Admission(generator, config(**settings), CollectorRegistry())


def http_of(admission: Admission, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(admission))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", **options)


def in_process(generator: ScriptedGenerator, **settings: object) -> httpx.AsyncClient:
    headers = {"content-type": "application/json"}  # of bodies that are given as bytes, too
    return http_of(admission_of(generator, **settings), headers=headers)


@asynccontextmanager
async def served_by(
    generator: ScriptedGenerator, **settings: object
) -> AsyncIterator[tuple[HttpServer, int, Admission]]:
    """The gateway's own HTTP server, its port, and what admits requests."""
    admission = admission_of(generator, **settings)
    (listener,) = bind("127.0.0.1", 0)
    listener.listen(BACKLOG)
    server = HttpServer(create_app(admission), admission.config.keep_alive_s)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield server, listener.getsockname()[1], admission
    finally:
        server.stop()
        await task
        await admission.close()


@asynccontextmanager
async def served(generator: ScriptedGenerator, **settings: object) -> AsyncIterator[tuple[int, Admission]]:
    """The same without the server itself."""
    async with served_by(generator, **settings) as (server, port, admission):
        assert not server.should_exit
        yield port, admission


@asynccontextmanager
async def grpc_server(
    add: Callable[[grpc.aio.Server], Any], max_message_bytes: int = 1 << 24, *options: Any
) -> AsyncIterator[str]:
    """The address of a server of ours to which `add` adds services."""
    server, address, _ = await start_server(lambda made: add(made) or [], "127.0.0.1", 0, max_message_bytes, *options)
    try:
        yield address
    finally:
        await server.stop(None)


@asynccontextmanager
async def grpc_of(admission: Admission, max_message_bytes: int = 1 << 24) -> AsyncIterator[tuple[Any, str]]:
    """(stub, address)"""
    add = GenerationServicer(admission).add_to
    async with grpc_server(add, max_message_bytes) as address, grpc.aio.insecure_channel(address) as channel:
        yield gateway_pb2_grpc.GenerationServiceStub(channel), address
