"""Digests that decide which requests share cached prefixes, a `lookup` corpus, or a place in the queue. Pure.

A digest is made of the API key's name, the `user` and the `cache_salt` of a request. Workers get only digests.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

_DIGEST_BYTES = 32


def salt_of(scope: str, key_name: str | None, user: str | None, salt: str | None) -> bytes:
    """Return the digest under which requests share cached prefixes: 32 bytes, or empty to share with all.

    scope: the setting `prefix_cache_scope`. user, salt: fields `user` and `cache_salt` of the request. Under the scope
    `user` a request without key, user and salt gets a random digest and shares with no other request. Otherwise a
    caller could learn from response times what others have sent.
    """
    if scope == "user":
        return _identity(key_name, user, salt) or secrets.token_bytes(_DIGEST_BYTES)
    if scope == "key" and key_name is not None:
        return _identity(key_name, None, salt)
    if salt is None:
        return b""
    return _digest(b"salt", salt)


def corpus_of(scope: str, key_name: str | None, user: str | None, salt: str | None, *, may_read: bool = False) -> bytes:
    """Return the digest under which requests with the drafter `lookup` share finished outputs, from which it copies
    draft tokens: 32 bytes. If it is empty, `lookup` copies only from the request itself, and the request's output is
    not stored.

    scope: the setting `lookup_scope`. user, salt: fields `user` and `cache_salt` of the request. Under the scope `user`
    a request without key, user and salt gets an empty digest. may_read: whether the response could reveal other
    requests' outputs, as under `explain`, which shows draft tokens, or lenience, with which the target accepts tokens
    that it would not have produced. Such a request gets an empty digest, except under the scope `user`.
    """
    if scope == "user":
        return _identity(key_name, user, salt)
    if may_read:
        return b""
    return _digest(b"salt", salt or "")


def _identity(key_name: str | None, user: str | None, salt: str | None) -> bytes:
    if key_name is not None:
        return _digest(b"key", key_name, user or "", salt or "")
    if user is not None:
        return _digest(b"user", user, salt or "")
    if salt is None:
        return b""
    return _digest(b"anonymous", salt)


def caller_of(key_name: str | None, salt: str | None) -> bytes:
    """Return the digest by which workers distinguish callers: 32 bytes, or empty without an API key and a salt.

    salt: field `cache_salt` of the request, used only if there is no API key.
    """
    if key_name is not None:
        return _digest(b"key", key_name)
    if salt is None:
        return b""
    return _digest(b"salt", salt)


def _digest(kind: bytes, *parts: str) -> bytes:
    """Each part is hashed by its own digest, so that no two lists of parts give the same result.

    # ("ab", "c") and ("a", "bc") differ
    """
    digest = blake2b(digest_size=_DIGEST_BYTES, person=kind)
    for part in parts:
        digest.update(blake2b(part.encode()).digest())
    return digest.digest()
