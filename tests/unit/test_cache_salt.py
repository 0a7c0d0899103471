"""Who shares cached prefixes with whom: by salt, and by user where the gateway says so."""

from __future__ import annotations

import itertools

import pytest

from gateway.admission.requests import salt_of
from gateway.generation import GenerationRequest, OutputTimings
from gateway.rounds.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.params import SamplingParams
from tests.service.scripted_generator import demo_tokenizer

NAMES = (None, "a", "ab", "b")


def test_shared_scope_looks_at_the_salt_alone() -> None:
    assert salt_of("shared", None, None, None) == salt_of("shared", "k", "a", None) == b""
    assert salt_of("shared", "k", "a", "x") == salt_of("shared", None, "b", "x") != salt_of("shared", None, "a", "y")


def test_user_scope_shares_between_equals_only() -> None:
    """("a", "ab") and ("aa", "b") must not meet either, however they are joined."""
    wishes = [wish for wish in itertools.product((None, "a", "k"), (*NAMES, "aa"), NAMES) if any(wish)]
    salts = [salt_of("user", *wish) for wish in wishes]
    assert [salt_of("user", *wish) for wish in wishes] == salts
    assert len(set(salts)) == len(salts)
    assert all(0 < len(salt) <= 256 for salt in salts)


def test_a_salt_does_not_show_the_users_name() -> None:
    for key_name in (None, "somebody"):
        assert b"somebody" not in salt_of("user", key_name, "somebody", "salty")
    assert b"salty" not in salt_of("shared", None, None, "salty")


@pytest.mark.parametrize(("first", "told"), [(3, 3), (0, 0), (99, 5)])
def test_the_first_verdict_says_what_was_cached(first: int, told: int) -> None:
    """A slot that is opened again finds what this answer itself has left there. Never more than the prompt."""
    request = GenerationRequest("r", "m", (5, 6, 7, 8, 9), SamplingParams(max_tokens=2), cache_salt=b"s")
    session = Session(request, demo_tokenizer(), 1)
    assert session.open_message(pb.WorkerInfo()).cache_salt == b"s"
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
