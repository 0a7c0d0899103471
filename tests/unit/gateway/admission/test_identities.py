"""Who shares cached prefixes and what `lookup` copies from with whom: by salt, key and user, as the gateway says."""

import itertools
from functools import partial

from gateway.admission.identities import corpus_of, salt_of

NAMES = (None, "a", "ab", "b")


def test_shared_scope_looks_at_the_salt_alone() -> None:
    assert salt_of("shared", None, None, None) == salt_of("shared", "k", "a", None) == b""
    assert salt_of("shared", "k", "a", "x") == salt_of("shared", None, "b", "x") != salt_of("shared", None, "a", "y")


def test_key_scope_shares_between_users_of_one_key_and_without_keys_between_all() -> None:
    for user, salt in itertools.product(NAMES, NAMES):
        assert salt_of("key", None, user, salt) == salt_of("shared", None, user, salt)
        assert salt_of("key", "k", user, salt) == salt_of("key", "k", None, salt)
    wishes = [(key_name, None, salt) for key_name in (None, "a", "k") for salt in NAMES]
    assert len({salt_of("key", *wish) for wish in wishes}) == len(wishes)


def test_user_scope_and_lookup_share_between_equals_only() -> None:
    """("a", "ab") and ("aa", "b") must not meet either, however they are joined."""
    wishes = [wish for wish in itertools.product((None, "a", "k"), (*NAMES, "aa"), NAMES) if any(wish)]
    for digest_of in (partial(salt_of, "user"), partial(corpus_of, "user")):
        digests = [digest_of(*wish) for wish in wishes]
        assert [digest_of(*wish) for wish in wishes] == digests
        assert len(set(digests)) == len(digests)
        assert {len(digest) for digest in digests} == {32}
    assert (
        corpus_of("user", None, None, None) == b"" and len({salt_of("user", None, None, None) for _ in range(2)}) == 2
    )


def test_where_lookup_is_shared_no_request_copies_that_could_read_what_is_copied() -> None:
    shared = partial(corpus_of, "shared")
    assert shared(None, None, None) == shared("k", "a", None) != b""
    assert shared(None, None, "x") == shared("k", "b", "x") != shared(None, None, None)
    assert shared("k", "a", "x", may_read=True) == b""
    assert corpus_of("user", "k", "a", "x", may_read=True) == corpus_of("user", "k", "a", "x")


def test_a_salt_does_not_show_the_users_name() -> None:
    for key_name in (None, "somebody"):
        assert b"somebody" not in salt_of("user", key_name, "somebody", "salty")
    assert b"salty" not in salt_of("shared", None, None, "salty")
