"""Raw gRPC calls: bytes in, bytes out, and the status that each call ended with."""

import queue
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from outrider.wire.transport.rpc import client_options

DEADLINE_S = 60.0
"""A call that ends by it has hung."""


def dial(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=client_options(address, 64 << 20))


def talk(
    channel: grpc.Channel, method: str, messages: Iterable[bytes], until: Callable[[bytes], bool | bytes] | None = None
) -> tuple[grpc.StatusCode, str, list[bytes]]:
    """Sends all, and ends its own side at once, or when a message arrives of which `until` is true. Bytes that it
    returns are sent as well.

    -> (status, details, what arrived)
    """
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for message in messages:
        outgoing.put(message)
    if until is None:
        outgoing.put(None)
    call: Any = channel.stream_stream(method)(iter(outgoing.get, None), timeout=DEADLINE_S)  # type: ignore[call-arg]
    arrived: list[bytes] = []
    try:
        for message in call:
            arrived.append(message)
            then = until is not None and until(message)
            if then:
                outgoing.put(then if isinstance(then, bytes) else None)
    except grpc.RpcError:
        pass
    finally:
        outgoing.put(None)
    return call.code(), call.details() or "", arrived


def hold(channel: grpc.Channel, method: str, message: bytes, until: Callable[[bytes], bool | bytes]) -> Any:
    """Send a message on a stream, and return that once `until` is not False. It is open as long as it is kept."""
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    outgoing.put(message)
    call: Any = channel.stream_stream(method)(iter(outgoing.get, None))  # type: ignore[call-arg]
    while until(next(call)) is False:
        pass
    call.add_callback(lambda: outgoing.put(None))
    return call
