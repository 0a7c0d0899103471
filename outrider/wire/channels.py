"""Channels to other parts: with certificates or without, decided here alone."""

from __future__ import annotations

import asyncio

import grpc.aio

from outrider.wire.roles import Role
from outrider.wire.rpc import client_options
from outrider.wire.tls import CertificateFolder, Certificates, channel_credentials


class Dialer:
    """The channel to one part; another one once our certificates have changed, since a channel keeps its own."""

    def __init__(
        self, address: str, role: Role, max_message_bytes: int, certificates: CertificateFolder | None
    ) -> None:
        """role: who must answer there, when there are certificates."""
        self._address = address
        self._role = role
        self._max_message_bytes = max_message_bytes
        self._folder = certificates
        self._used: Certificates | None = None
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self) -> grpc.aio.Channel:
        """For the next connection. One that was given before is closed when this is another, and its calls end."""
        current = None if self._folder is None else self._folder.current
        if self._channel is None or current is not self._used:
            if self._channel is not None:
                closing = asyncio.create_task(self._channel.close(None))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._channel, self._used = self._open(current), current
        return self._channel

    def _open(self, certificates: Certificates | None) -> grpc.aio.Channel:
        options = client_options(self._max_message_bytes)
        address = f"dns:///{self._address}"  # an address that was sent to us must not be read as a path or a scheme
        if certificates is None:
            return grpc.aio.insecure_channel(address, options=options)
        # Addresses of workers come and go; what is checked is that the certificate is of the part that we want.
        name = ("grpc.ssl_target_name_override", self._role.host_name)
        return grpc.aio.secure_channel(address, channel_credentials(certificates), options=[*options, name])

    async def close(self) -> None:
        """Ends its calls. Idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
        await asyncio.gather(*self._closing)
