"""Texts that a peer sends of itself: bounded, and of one line."""

from outrider.v1 import common_pb2 as pb
from outrider.v1 import registry_pb2 as rpb
from outrider.wire.peer_text import MAX_NAME_BYTES, MAX_REASON_BYTES, bound_strings, bound_text


def test_a_text_is_one_line_of_so_many_bytes() -> None:
    assert bound_text("hub/model-7 é") == "hub/model-7 é"
    assert bound_text("a\r\n\x1b[31m\x9b\u2028\u202eb\udc80") == r"a\r\n\x1b[31m\x9b\u2028\u202eb\udc80"
    for text in ("é" * 300, "\n" * 300, "x" * 257):
        cut = bound_text(text)
        assert len(cut.encode()) <= MAX_NAME_BYTES and cut.endswith("...")
    assert bound_text("x" * 256) == "x" * 256


def test_every_text_of_a_message_is_bounded_and_nothing_else_is_touched() -> None:
    info = pb.WorkerInfo(
        model_id="a\nb",
        device="x" * 9999,
        features_refusal="why " * 9999,
        vocab_size=7,
        shared_vocabularies=[pb.SharedVocabulary(tokenizer_fingerprint="\x1b", vocab_size=8)],
    )
    bound_strings(info)
    assert (info.model_id, info.vocab_size) == (r"a\nb", 7)
    assert (len(info.device), len(info.features_refusal)) == (MAX_NAME_BYTES, MAX_REASON_BYTES)
    assert (info.shared_vocabularies[0].tokenizer_fingerprint, info.shared_vocabularies[0].vocab_size) == (r"\x1b", 8)
    report = rpb.GatewayReport(gateway="g", responsive_workers=["m\n", "n"], pools=[rpb.PoolLoad(pool="p" * 999)])
    bound_strings(report)
    assert list(report.responsive_workers) == [r"m\n", "n"] and len(report.pools[0].pool) == MAX_NAME_BYTES
