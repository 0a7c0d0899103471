"""Tables of blocks, and plans over them."""

import torch
from transformers import PreTrainedModel

from outrider.engine.attention.paged import PagedPath
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner

VOCAB_SIZE = 97
CPU = torch.device("cpu")


def paged(model: PreTrainedModel, num_blocks: int = 64) -> ModelRunner:
    facts = ModelFacts("tiny", VOCAB_SIZE, 128, "float32", "cpu", (), 0)
    return ModelRunner(PagedPath(model, VOCAB_SIZE), facts, KVPool(num_blocks, 16), CPU)
