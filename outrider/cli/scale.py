"""`outrider scale`: shows the pools of a running system, and changes the number of workers of one."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import grpc
import grpc.aio
import typer

from outrider.cli.console import errors_as_lines, note_console
from outrider.v1 import registry_pb2 as pb
from outrider.v1 import registry_pb2_grpc
from outrider.wire.errors import DeadlineExceeded, OutriderError, Unavailable
from outrider.wire.transport.roles import Role
from outrider.wire.transport.rpc import CONTROL_BYTES
from outrider.wire.transport.tls import CertificateFolder, Dialer

_CALL_TIMEOUT_S = 10.0
_POLL_S = 0.5
"""Seconds between two calls to the registry while the command waits for a pool to change."""
_ROLES = {pb.ROLE_TARGET: "target", pb.ROLE_DRAFT: "draft"}


def scale(
    pool: Annotated[str | None, typer.Argument(help="Name of a pool; absent = show all pools.")] = None,
    count: Annotated[
        int | None, typer.Argument(min=0, help="Workers that the pool is to have; absent = only show it.")
    ] = None,
    registry: Annotated[str, typer.Option(help="host:port of the launcher's registry.")] = "127.0.0.1:7000",
    tls_dir: Annotated[str | None, typer.Option(help="Folder of the launcher's certificates, if it has any.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the pool has COUNT workers, and no others.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Maximum seconds to wait; the pool changes on after that.")] = 900.0,
) -> None:
    """Show the pools of a running system, or set the number of workers of POOL to COUNT.

    Workers that are no longer needed first finish their running requests.
    """
    with errors_as_lines():
        folder = None
        if tls_dir is not None:
            folder = CertificateFolder(tls_dir, "--tls-dir", Role.LAUNCHER)
        sizes = asyncio.run(_scale(Dialer(registry, Role.LAUNCHER, CONTROL_BYTES, folder), pool, count, wait, timeout))
        for size in sizes:
            typer.echo(_line(size))


async def _scale(
    dialer: Dialer, pool: str | None, count: int | None, wait: bool, timeout_s: float
) -> list[pb.PoolSize]:
    give_up = time.monotonic() + timeout_s
    try:
        sizes = await _call(dialer, pb.ScaleRequest(pool=pool or "", num_workers=count))
        while wait and count is not None and not all(map(_is_reached, sizes)):
            if time.monotonic() > give_up:
                raise DeadlineExceeded(f"after {timeout_s:g} s: {_line(sizes[0])}")
            note_console().print(_line(sizes[0]), style="dim", markup=False)
            before = sizes
            while sizes == before and time.monotonic() <= give_up:
                await asyncio.sleep(_POLL_S)
                sizes = await _call(dialer, pb.ScaleRequest(pool=pool or ""))
        return sizes
    finally:
        await dialer.close()


async def _call(dialer: Dialer, request: pb.ScaleRequest) -> list[pb.PoolSize]:
    stub: Any = registry_pb2_grpc.RegistryServiceStub(dialer.channel())
    try:
        reply: pb.ScaleReply = await stub.Scale(request, timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            remedy = "say --registry HOST:PORT, and --tls-dir where it has certificates"
            raise Unavailable(f"no answer from the registry: {error.details()}; {remedy}") from None
        raise OutriderError(error.details() or error.code().name) from None
    return list(reply.pools)


def _is_reached(size: pb.PoolSize) -> bool:
    return size.num_serving == size.num_desired and not size.num_starting and not size.num_draining


def _line(size: pb.PoolSize) -> str:
    counts = [f"{size.num_serving} serving"]
    if size.num_starting:
        counts.append(f"{size.num_starting} starting")
    if size.num_draining:
        counts.append(f"{size.num_draining} draining")
    return f"{size.pool} ({_ROLES.get(size.role, 'unknown')}): {', '.join(counts)}, {size.num_desired} wanted"
