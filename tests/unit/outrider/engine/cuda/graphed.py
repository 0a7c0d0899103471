"""Runners whose steps are served by graphs, without CUDA."""

import torch

from outrider.engine.attention.paged import PagedPath
from outrider.engine.attention.varlen_attention import BLOCK_SIZE, VarlenAttention
from outrider.engine.cuda.graphed_path import GraphedPath
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from tests.shrunk import shrunk
from tests.tiny_models import random_model
from tests.unit.outrider.engine.cuda.cuda_tape import TapeMaker, varlen_attn

CONTEXT = 128
MAX_ROWS = 3
WIDTHS = (6, 1)


def make(name: str, maker: TapeMaker) -> tuple[ModelRunner, GraphedPath, UncachedModel]:
    model = random_model(shrunk(name), seed=3)
    vocab_size = model.config.vocab_size
    path = GraphedPath(PagedPath(model, vocab_size, VarlenAttention(varlen_attn)), model, vocab_size, maker, WIDTHS)
    facts = ModelFacts("tiny", vocab_size, CONTEXT, "float32", "cpu", (0,), 0, num_layers=2, hidden_size=128)
    runner = ModelRunner(path, facts, KVPool(8, BLOCK_SIZE), torch.device("cpu"))
    runner.allocate()
    path.prepare(MAX_ROWS, CONTEXT)
    maker.num_replays = 0  # of those that proved the graphs
    return runner, path, UncachedModel(model)
