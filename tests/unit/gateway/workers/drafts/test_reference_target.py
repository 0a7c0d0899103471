"""What a later target of a pool must be."""

import pytest

from gateway.workers.drafts.reference_target import ReferenceTarget
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import IncompatiblePair
from tests.unit.gateway.rounds.test_detokenizer import byte_level
from tests.unit.gateway.scripted_pool import INFO


def test_what_a_later_target_must_be() -> None:
    reference = ReferenceTarget(INFO, pb.TokenizerFiles(), byte_level(), INFO.model_id)
    same = pb.WorkerInfo()
    same.CopyFrom(INFO)
    reference.check_target(same, same.model_id)
    for change, message in (
        ({"vocab_size": 127}, "has vocabulary 127"),
        ({"tokenizer_fingerprint": "other"}, "has vocabulary 128 other"),
        ({"model_id": "another"}, "came back as another in"),
        ({"dtype": "bfloat16"}, "in bfloat16 "),
        ({"quantization": "int8"}, "quantization int8"),
        ({"is_batch_invariant": True}, "batch-invariant"),
        ({"eos_token_ids": [3]}, r"ending at \[3\]"),
        ({"context_limit": 100}, "context limit is 100, the pool was started with 512"),
    ):
        other = pb.WorkerInfo()
        other.CopyFrom(INFO)
        other.MergeFrom(pb.WorkerInfo(**change))
        with pytest.raises(IncompatiblePair, match=message):
            reference.check_target(other, other.model_id)
    with pytest.raises(IncompatiblePair, match="another folder named model than the one the pool was started with"):
        reference.check_target(same, "/elsewhere/model")
