"""What a round counts."""

from typing import Any

import pytest

from gateway.telemetry.round_metrics import note_round
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind
from outrider.wire.telemetry.metrics import GatewayMetrics
from tests.service.scripted_generator import TIMINGS, demo_tokenizer
from tests.unit.gateway.rounds.verdicts import session_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


@pytest.mark.parametrize(
    ("drafter", "kind"), [("", TokenKind.FORCED), ("prediction", TokenKind.PREDICTED), ("ngram", TokenKind.ACCEPTED)]
)
def test_accepted_tokens_are_counted_by_kind(tokenizer: Tokenizer, drafter: Any, kind: TokenKind) -> None:
    session, ids = session_of(tokenizer), tokenizer.encode("the quick brown fox")
    verdict = tpb.Verdict(
        committed_len=3,
        token_ids=ids[:3],
        kinds=[pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_RECOVERED],
        num_drafted=3,
        num_accepted=2,
        drafter=drafter,
    )
    output = session.apply(verdict, TIMINGS)
    assert [token.kind for token in output.tokens] == [kind, kind, TokenKind.RECOVERED]
    metrics = GatewayMetrics()
    note_round(metrics.pair("t", "d"), verdict, output, "")
    counted = {kind.name.lower() for kind in TokenKind} - {"forced", "predicted"}
    assert {
        name: metrics.registry.get_sample_value(
            "spec_emitted_tokens_total", {"target": "t", "draft": "d", "kind": name}
        )
        for name in (*counted, "forced", "predicted")
    } == dict.fromkeys(counted, 0.0) | {"accepted": 2.0, "recovered": 1.0, "forced": None, "predicted": None}
