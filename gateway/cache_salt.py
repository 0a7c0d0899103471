"""Whose cached prefixes a request may use, and who may use its own. Called by `gateway.requests`."""

from __future__ import annotations

import secrets
from hashlib import blake2b

_DIGEST_BYTES = 32


def salt_of(scope: str, key_name: str | None, user: str | None, salt: str | None) -> bytes:
    """-> what the workers are given: 32 bytes, or none for what everybody shares.

    scope: shared, or user: then prefixes are shared by requests of one API key and user alone. One that names neither,
    nor a salt, shares with nobody: what cannot be told apart must not be guessed from its timing.
    """
    if scope == "shared":
        return b"" if salt is None else _digest(b"salt", salt)
    if key_name is not None:
        return _digest(b"key", key_name, user or "", salt or "")
    if user is None and salt is None:
        return secrets.token_bytes(_DIGEST_BYTES)
    return _digest(b"anonymous", salt or "") if user is None else _digest(b"user", user, salt or "")


def _digest(kind: bytes, *parts: str) -> bytes:
    """Each part by its own digest, so that no two lists of parts read the same."""
    found = blake2b(digest_size=_DIGEST_BYTES, person=kind)
    for part in parts:
        found.update(blake2b(part.encode()).digest())
    return found.digest()
