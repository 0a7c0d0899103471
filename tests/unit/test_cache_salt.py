"""Who shares cached prefixes and what `lookup` copies from with whom: by salt, key and user, as the gateway says."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from gateway.admission.identities import corpus_of, salt_of
from gateway.generation import GenerationRequest, OutputTimings
from gateway.rounds.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.requests.params import SamplingParams
from tests.service.scripted_generator import demo_tokenizer

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


@pytest.mark.parametrize(("first", "told"), [(3, 3), (0, 0), (99, 5)])
def test_the_first_verdict_says_what_was_cached(first: int, told: int) -> None:
    """A slot that is opened again finds what this answer itself has left there. Never more than the prompt."""
    request = GenerationRequest(
        "r", "m", (5, 6, 7, 8, 9), SamplingParams(max_tokens=2), cache_salt=b"s", corpus_id=b"c"
    )
    session = Session(request, demo_tokenizer(), 1)
    opened = session.open_message()
    assert (opened.cache_salt, opened.corpus_id) == (b"s", b"c")
    for num_cached, finish in ((first, pb.FINISH_REASON_UNSPECIFIED), (4, pb.FINISH_REASON_LENGTH)):
        verdict = tpb.Verdict(
            committed_len=session.committed_len,
            token_ids=[11],
            kinds=[pb.TOKEN_KIND_PLAIN],
            num_cached_tokens=num_cached,
            finish_reason=finish,
        )
        output = session.apply(verdict, OutputTimings())
    assert output.usage is not None and output.usage.num_cached_prompt_tokens == told
