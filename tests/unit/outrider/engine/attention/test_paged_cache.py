"""Keys and values in blocks, beside transformers' own cache."""

import pytest
from transformers import PreTrainedModel

from outrider.engine.attention.paged_cache import ATTENTION_NAME
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest
from tests.unit.outrider.engine.attention.tables import paged

VOCAB_SIZE = 97


def test_the_self_test_s_truth_and_other_users_keep_transformers_attention(llama: PreTrainedModel) -> None:
    before = llama.config._attn_implementation
    runner = paged(llama)
    table = runner.pool.new_table()
    runner.forward([Row.of(table, [1, 2, 3], 0, 1)])
    with pytest.raises(InvalidRequest):
        runner.forward([Row.of(table, [1, 2, 3, VOCAB_SIZE], 3, 1)])
    assert llama.config._attn_implementation == before != ATTENTION_NAME
