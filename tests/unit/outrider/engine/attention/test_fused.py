"""The fused path: the logits of transformers for every family it takes, and the same bits however work was cut."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.engine.attention.fused import FusedPath
from outrider.engine.errors import PathUnavailable
from outrider.engine.kv_pool import BlockTable, KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest
from tests.rounds import Fed, Grown, Truth, some_ids, step, truth_of
from tests.tiny_models import random_model

TARGET = Path(__file__).parents[5] / "models" / "demo" / "target"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-2}
"""Largest difference, as a share of the largest logit. transformers rounds more in bfloat16 than we do."""
VOCAB_SIZE = 97
BASE: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
BASE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA3 = {"head_dim": 32, "num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 3}
GEMMA3 |= {"query_pre_attn_scalar": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama of odd sizes": ("llama", {"hidden_size": 72, "intermediate_size": 101, "head_dim": 24, "vocab_size": 131}),
    "llama with one kv head of 8": ("llama", {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "llama with heads of 80": ("llama", {"head_dim": 80, "num_key_value_heads": 4}),
    "rope linear": ("llama", {"rope_parameters": LINEAR}),
    "rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "rope yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows in some layers": ("qwen2", WINDOWS),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral with a window": ("mistral", {"sliding_window": 24}),
    "llama that names a window": ("llama", {"sliding_window": 16}),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 of odd sizes with rope linear": (
        "gemma3_text",
        {**GEMMA3, "hidden_size": 72, "intermediate_size": 101, "vocab_size": 131, "num_key_value_heads": 1}
        | {"rope_parameters": {**ROPES, "full_attention": {**LINEAR, "rope_theta": 1e6}}},
    ),
}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    family, options = FAMILIES[name]
    model = random_model(CONFIG_MAPPING[family](**{**BASE, **options}), seed=5)
    for number, vector in enumerate(each for each in model.parameters() if each.dim() == 1):  # norms and biases
        vector += 0.3 * torch.randn(vector.shape, generator=torch.Generator().manual_seed(number))
    return model.to(dtype).eval()


def runner_of(model: PreTrainedModel, num_blocks: int = 256, context: int | None = None) -> ModelRunner:
    limit = context or model.config.max_position_embeddings
    dtype = str(model.dtype).removeprefix("torch.")
    facts = ModelFacts("tiny", model.config.vocab_size, limit, dtype, "cpu", (0,), 0)
    return ModelRunner(FusedPath(model, facts), facts, KVPool(num_blocks, 16), torch.device("cpu"))


def fed(runner: ModelRunner, truth: Truth, seed: int) -> Fed:
    return Fed(runner, truth, some_ids(240, runner.facts.vocab_size, seed), relative=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in FAMILIES),
        *((name, torch.bfloat16) for name in ("llama of odd sizes", "qwen3", "gemma3")),
    ],
)
def test_ragged_rounds_equal_a_forward_without_cache(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    runner, truth = runner_of(model), truth_of(model)
    a, b, c, d = (fed(runner, truth, seed) for seed in range(4))
    errors = [
        step(runner, [(a, 130, 0), (b, 9, 1), (c, 1, 1)]),  # prompts: long enough to be split, narrow, one token
        step(runner, [(a, 147, 1), (b, 10, 1), (c, 2, 1), (d, 20, 0)]),  # the rest of a prompt among decodes
        step(runner, [(a, 153, 6), (b, 16, 6), (c, 8, 6), (d, 21, 1)]),  # verify K = 5, and one plain step
    ]
    a.roll_back(148, 10)  # all refused
    b.roll_back(13, 11)  # two kept
    c.roll_back(3, 12)
    errors.append(step(runner, [(a, 154, 6), (b, 15, 2), (c, 4, 1), (d, 27, 6)]))  # ragged K
    d.table.free()
    a.roll_back(64, 13)  # far back, to the edge of a tile of keys
    errors.append(step(runner, [(a, 65, 1), (b, 16, 1), (c, 10, 6)]))
    errors.append(step(runner, [(a, 71, 6)]))
    errors.append(step(runner, [(a, 200, 129), (c, 60, 50)]))  # every logit of two long pieces
    assert max(errors) < TOLERANCE[dtype], errors


# The same bits.


def target(dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype).eval()


@pytest.fixture(scope="module")
def texts(request: pytest.FixtureRequest) -> list[list[int]]:
    """8 pieces of real text of different lengths, token ids."""
    prompts: list[str] = request.getfixturevalue("dev_prompts")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    pieces = [tokenizer(f"{prompts[i]}\n{prompts[i + 1]}\n{prompts[i + 2]}")["input_ids"] for i in range(8)]
    return [ids[: 90 + 5 * i] for i, ids in enumerate(pieces)]


class Fresh:
    """All logits of one text from an empty table, in widths of the caller's choice."""

    def __init__(self, runner: ModelRunner, ids: list[int], widths: list[int]) -> None:
        self.table: BlockTable = runner.pool.new_table()
        self.ids, self.widths, self.parts, self.end = ids, widths, [], 0

    def row(self) -> Row | None:
        begin = self.end
        width = self.widths.pop(0) if len(self.widths) > 1 else self.widths[0]
        self.end = min(len(self.ids), begin + width)
        return Row.of(self.table, self.ids[: self.end], begin, self.end - begin) if self.end > begin else None


def logits_of(runner: ModelRunner, texts: list[list[int]], widths: list[int]) -> list[Tensor]:
    """All texts in one batch until each has ended; the last width goes on."""
    feeds = [Fresh(runner, ids, list(widths)) for ids in texts]
    while rows := [(feed, row) for feed in feeds if (row := feed.row()) is not None]:
        logits = runner.forward([row for _, row in rows])
        parts = logits.split([row.num_logits for _, row in rows])
        for (feed, _), part in zip(rows, parts, strict=True):
            feed.parts.append(part)
    for feed in feeds:
        feed.table.free()
    return [torch.cat(feed.parts) for feed in feeds]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_in_every_batch_width_and_chunking(dtype: torch.dtype, texts: list[list[int]]) -> None:
    runner = runner_of(target(dtype), num_blocks=512)
    whole = [logits_of(runner, [ids], [len(ids)])[0] for ids in texts]  # each prompt alone and at once
    for batch in (1, 8):
        for widths in ([60, 1], [59, 9], [7, 32, 13, 5]):
            for expected, got in zip(whole, logits_of(runner, texts[:batch], widths), strict=False):
                assert torch.equal(got, expected), f"batch {batch}, widths {widths}"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("llama of odd sizes", "qwen3", "mistral with a window", "gemma3")),
        ("gemma3", torch.bfloat16),
    ],
)
def test_the_same_bits_in_other_families(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    runner = runner_of(model)
    texts = [some_ids(100 + 7 * i, model.config.vocab_size, i) for i in range(5)]
    whole = [logits_of(runner, [ids], [len(ids)])[0] for ids in texts]
    for widths in ([40, 1], [3, 50, 17]):
        for expected, got in zip(whole, logits_of(runner, texts, widths), strict=True):
            assert torch.equal(got, expected), widths


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("the demo target", torch.float32), ("the demo target", torch.bfloat16), ("gemma3", torch.float32)],
)
def test_the_same_bits_with_any_number_of_threads(
    name: str, dtype: torch.dtype, texts: list[list[int]], set_threads: Callable[[int], None]
) -> None:
    model, results = target(dtype), []
    if name != "the demo target":
        model, texts = model_of(name, dtype), [some_ids(90 + 5 * i, VOCAB_SIZE, i) for i in range(4)]
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        runner = runner_of(model, num_blocks=512)
        results.append(torch.cat(logits_of(runner, texts[:4], [64, 6])))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


LONG = {"max_position_embeddings": 2048, "num_key_value_heads": 1}
LONG_FAMILIES = {"llama": ("llama", LONG), "gemma3": ("gemma3_text", {**GEMMA3, **LONG, "sliding_window": 700})}
"""Of one key and value head, so that threads share its keys."""


def long_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    family, options = LONG_FAMILIES[name]
    return random_model(CONFIG_MAPPING[family](**{**BASE, **options}), seed=5).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", LONG_FAMILIES)
def test_keys_shared_by_threads_give_the_bits_of_one_thread(
    name: str, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """A long row is shared when it is alone, and not among as many as the threads."""
    model = long_model(name, dtype)
    texts = [some_ids(1540 - 11 * i, VOCAB_SIZE, i) for i in range(7)]
    set_threads(1)
    whole = logits_of(runner_of(model, num_blocks=1024), texts[:1], [len(texts[0])])[0]
    for num_threads in (2, 3):
        set_threads(num_threads)
        runner = runner_of(model, num_blocks=1024)
        for batch, widths in ((1, [1020, 1, 6]), (1, [1530, 5]), (2, [500, 30]), (7, [1500, 6])):
            assert torch.equal(logits_of(runner, texts[:batch], widths)[0], whole), (num_threads, batch, widths)
    expected = truth_of(model)(texts[0])  # [T, V]
    assert float((whole - expected).abs().max() / expected.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_ids", [505, 512, 1300])
def test_a_tree_behind_shared_keys_has_the_bits_of_its_chains(num_ids: int, set_threads: Callable[[int], None]) -> None:
    """Its chains may reach over the end of what one thread takes: 512 keys."""
    model = long_model("gemma3", torch.float32)
    for num_threads in (1, 2):
        set_threads(num_threads)
        runner = runner_of(model, num_blocks=512)
        runner.tree_refusal = None
        ids, nodes = some_ids(num_ids, VOCAB_SIZE, 1), some_ids(36, VOCAB_SIZE, 2)
        tree = Grown(runner, runner.pool.new_table(), ids, nodes, [*range(-1, 23), *(i // 2 for i in range(12))])
        runner.forward([Row.of(tree.table, ids, 0, 0)])
        logits = torch.cat([runner.forward([tree.row(0, 20)]), runner.forward([tree.row(20, 36)])])  # [36, V]
        for leaf in tree.leaves():
            chain = tree.chain_to(leaf)
            expected = logits_of(runner, [chain], [len(chain)])[0][num_ids:]
            assert torch.equal(logits[tree.path_to(leaf)], expected), (num_threads, leaf)


def test_a_tied_embedding_is_held_once() -> None:
    tied, apart = (FusedPath(model, runner_of(model).facts) for model in map(model_of, ("llama tied", "llama")))
    assert apart.weights_bytes - tied.weights_bytes == VOCAB_SIZE * BASE["hidden_size"] * 4


# What it refuses.


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gpt2", {}, "LlamaForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"head_dim": 20}, "heads of"),
        ("gemma2", {}, "LlamaForCausalLM"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "not final_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not use_bidirectional_attention"),
        ("gemma3_text", {**GEMMA3, "rope_parameters": {**ROPES, "full_attention": DYNAMIC}}, "dynamic"),
        ("llama", {"rope_parameters": DYNAMIC}, "dynamic"),
    ],
)
def test_another_model_is_refused_with_the_reason(family: str, options: dict[str, Any], reason: str) -> None:
    shape = BASE if family != "gpt2" else {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 1, "n_head": 4}
    model = random_model(CONFIG_MAPPING[family](**{**shape, **options}), seed=1)
    with pytest.raises(PathUnavailable, match=reason):
        runner_of(model, context=64)


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, 2**40])
def test_a_token_outside_the_vocabulary_is_named_and_changes_nothing(bad: int) -> None:
    model = model_of("llama")
    runner = runner_of(model)
    a = fed(runner, truth_of(model), 1)
    step(runner, [(a, 20, 1)])
    with pytest.raises(InvalidRequest, match=f"{bad} is outside the vocabulary"):
        runner.forward([Row.of(a.table, [*a.ids[:20], 5, bad], 20, 1)])
    assert a.table.num_tokens == 20
    assert step(runner, [(a, 26, 6)]) < TOLERANCE[torch.float32]


def test_a_path_that_is_dropped_ends_its_threads(set_threads: Callable[[int], None]) -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    set_threads(3)
    runner = runner_of(model_of("llama"))
    logits_of(runner, [some_ids(40, VOCAB_SIZE, 1)], [40])
    during = len(list(Path("/proc/self/task").iterdir()))
    del runner
    assert during >= before + 2
    assert len(list(Path("/proc/self/task").iterdir())) <= during - 2


def test_an_idle_path_burns_no_processor_time(set_threads: Callable[[int], None]) -> None:
    set_threads(3)
    runner = runner_of(model_of("llama"))
    logits_of(runner, [some_ids(40, VOCAB_SIZE, 1)], [40])
    time.sleep(0.05)  # longer than a thread spins
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.1
