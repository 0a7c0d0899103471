"""The paged path: plans, what each kind of attention needs, mixed widths, and rows that do not see one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from outrider.engine.attention import paged_attention
from outrider.engine.attention.block_cache import layer_limits
from outrider.engine.attention.paged import PagedPath, PathUnavailable
from outrider.engine.attention.paged_attention import TorchAttention
from outrider.engine.attention.paged_cache import ATTENTION_NAME
from outrider.engine.attention.paged_plan import AttentionOptions, PagedPlan
from outrider.engine.kv_pool import TRASH_BLOCK, BlockTable, KVPool
from outrider.engine.loading.attention_choice import choose_path
from outrider.engine.loading.loader import load_runner
from outrider.engine.memory import masks_bytes
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError, InvalidRequest
from outrider.wire.settings.config import TargetConfig
from tests.rounds import some_ids
from tests.shrunk import shrunk
from tests.tiny_models import random_model, save
from tests.zoo import SHAPE

VOCAB_SIZE = 97
TOLERANCE = 1e-4
CPU = torch.device("cpu")
META = torch.device("meta")


def paged(model: PreTrainedModel, num_blocks: int = 64) -> ModelRunner:
    facts = ModelFacts("tiny", VOCAB_SIZE, 128, "float32", "cpu", (), 0)
    return ModelRunner(PagedPath(model, VOCAB_SIZE), facts, KVPool(num_blocks, 16), CPU)


# Plans ----------------------------------------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Tables that share a pool, so that their blocks lie anywhere; any widths, any logits."""
    pool = KVPool(64, 4)
    tables = [pool.new_table() for _ in range(draw(st.integers(1, 5)))]
    lengths = [0] * len(tables)
    for _ in range(draw(st.integers(0, 12))):  # they grow in turns
        i = draw(st.integers(0, len(tables) - 1))
        lengths[i] += draw(st.integers(1, 6))
        tables[i].reserve(lengths[i])
    made = []
    for table, length in zip(tables, lengths, strict=True):
        num_new = draw(st.integers(1, 9))
        table.reserve(length + num_new)
        ids = draw(st.lists(st.integers(0, 9), min_size=length + num_new, max_size=length + num_new))
        made.append(Row.of(table, ids, length, draw(st.integers(0, num_new))))
    return made


def place(table: BlockTable, position: int) -> int:
    return table.blocks[position // table.block_size] * table.block_size + position % table.block_size


@settings(max_examples=100)
@given(rows())
def test_a_plan_says_of_each_token_what_the_tables_say(made: list[Row]) -> None:
    plan = PagedPlan.build(made, CPU, 10, gathers=True)
    new = [(row, position) for row in made for position in range(row.num_cached, row.num_tokens)]
    assert plan.position_ids.tolist() == [[position for _, position in new]]
    assert plan.input_ids.tolist() == [[row.last_ids(row.num_tokens)[position] for row, position in new]]
    assert plan.write_to.tolist() == [place(row.table, position) for row, position in new]
    wanted = [row.num_tokens - position <= row.num_logits for row, position in new]
    assert plan.logits_at.tolist() == [i for i, want in enumerate(wanted) if want]
    assert plan.gather is not None
    assert plan.gather.tolist() == [place(row.table, i) for row in made for i in range(row.num_tokens)]
    assert plan.kv_lens.tolist() == [row.num_tokens for row in made]
    assert plan.cu_seq_q.diff().tolist() == [row.num_new for row in made] and plan.cu_seq_q[0] == 0
    assert plan.cu_seq_kv.diff().tolist() == plan.kv_lens.tolist() and plan.cu_seq_kv[0] == 0
    for row, blocks in zip(made, plan.block_table.tolist(), strict=True):
        assert blocks[: len(row.table.blocks)] == row.table.blocks
        assert set(blocks[len(row.table.blocks) :]) <= {TRASH_BLOCK}
    assert (plan.max_q, plan.max_kv) == (max(row.num_new for row in made), max(row.num_tokens for row in made))


# Attention ------------------------------------------------------------------------------------------------------------


def reference(query: Tensor, keys: Tensor, values: Tensor, position: int, options: AttentionOptions) -> Tensor:
    """One query [Hq, D] at a position over keys [L, Hkv, D] and values [L, Hkv, Dv], in float64: the definition."""
    seen = list(range(position + 1 if options.causal else len(keys)))
    if options.window is not None:
        seen = [i for i in seen if abs(i - position) < options.window]
    if options.chunk is not None:
        seen = [i for i in seen if i // options.chunk == position // options.chunk]
    shared = query.shape[0] // keys.shape[1]
    out = []
    for head in range(query.shape[0]):
        k, v = keys[seen, head // shared].double(), values[seen, head // shared].double()
        scores = k @ query[head].double() * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks[head : head + 1].double()])
        out.append(torch.softmax(scores, 0)[: len(seen)] @ v)
    return torch.stack(out)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS = [
    AttentionOptions(0.3),
    AttentionOptions(0.3, window=5),
    AttentionOptions(0.3, chunk=8),
    AttentionOptions(0.3, softcap=1.5),
    AttentionOptions(0.3, sinks=SINKS),
    AttentionOptions(0.3, window=3, softcap=1.5, sinks=SINKS),
    AttentionOptions(0.3, causal=False),
    AttentionOptions(0.3, window=3, causal=False),
]


@pytest.mark.parametrize("how", ["alone", "together", "as on a GPU"])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: f"window {o.window} chunk {o.chunk} cap {o.softcap} causal {o.causal}"
)
def test_attention_over_blocks_equals_its_definition(
    options: AttentionOptions, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN wherever no row's tokens lie: an unread key must stay unread, not masked."""
    monkeypatch.setattr(paged_attention, "TOGETHER_BYTES", 0 if how == "alone" else 1 << 20)
    if how == "as on a GPU":
        num_parts = paged_attention._num_parts
        monkeypatch.setattr(paged_attention, "_num_parts", lambda group, num, _: num_parts(group, num, META))
    generator = torch.Generator().manual_seed(0)
    pool = KVPool(50, 4)
    shapes = [(21, 1), (9, 6), (1, 1), (30, 6), (17, 17), (13, 1), (6, 6), (33, 2), (39, 18)]
    made = grown_rows(pool, shapes)
    plan = PagedPlan.build(made, CPU, 10, gathers=True)
    keys, values = torch.full((51, 4, 2, 6), torch.nan), torch.full((51, 4, 2, 10), torch.nan)
    keys[TRASH_BLOCK], values[TRASH_BLOCK] = 0.0, 0.0
    assert plan.gather is not None
    lines = [torch.randn(len(plan.gather), 2, width, generator=generator) for width in (6, 10)]  # [S, Hkv, D]
    keys.flatten(0, 1)[plan.gather], values.flatten(0, 1)[plan.gather] = lines
    query = torch.randn(plan.num_tokens, 4, 6, generator=generator)  # [T, Hq, D]
    truth = expected(query, lines[0], lines[1], plan, options)
    attention = TorchAttention()
    attention.begin(plan)
    assert (attention.attend(query, keys, values, plan, options) - truth).abs().max() < 1e-5
    assert (attention.attend_gathered(query, lines[0], lines[1], plan, options) - truth).abs().max() < 1e-5


def test_the_mask_of_a_piece_of_a_prompt_is_made_on_the_device_once_for_all_heads() -> None:
    """The device "meta" stands in for a GPU: nothing that the host made may be among what is attended with."""
    table = KVPool(80, 16).new_table()
    num_new, num_tokens, num_heads = 512, 1230, 8
    table.reserve(num_tokens)
    plan = PagedPlan.build([Row.of(table, [1] * num_tokens, num_tokens - num_new, 1)], CPU, 10)
    query = torch.empty(num_new, num_heads, 16, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(81, 16, 2, 16, dtype=torch.bfloat16, device="meta")
    attention = TorchAttention()
    attention.begin(plan)
    attention.attend(query, keys, keys, plan, AttentionOptions(0.3))
    assert attention._groups is not None
    (mask,) = attention._groups[0].masks.values()
    assert (mask.device.type, mask.shape) == ("meta", (1, 1, num_new, num_tokens))
    assert mask.stride(2) == 1232, "rows are aligned, or torch copies them"
    counted = masks_bytes([(None, None)], query.element_size(), num_new, num_tokens)
    assert mask.untyped_storage().nbytes() <= counted


def grown_rows(pool: KVPool, shapes: list[tuple[int, int]]) -> list[Row]:
    """(tokens, new ones) of each; tables grow in turns, so that their blocks are scattered."""
    tables = [pool.new_table() for _ in shapes]
    for end in range(3, 40, 3):
        for table, (length, _) in zip(tables, shapes, strict=True):
            table.reserve(min(end, length))
    return [Row.of(t, [1] * length, length - new, 1) for t, (length, new) in zip(tables, shapes, strict=True)]


def expected(query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions) -> Tensor:
    out, start = [], 0
    for row in plan.rows:
        mine = slice(start, start + row.kv_len)
        for i in range(row.num_new):
            position = row.kv_len - row.num_new + i
            out.append(reference(query[row.start + i], keys[mine], values[mine], position, options))
        start += row.kv_len
    return torch.stack(out).float()


# The path -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return random_model(shrunk("llama"), seed=3)


def test_the_self_test_s_truth_and_other_users_keep_transformers_attention(llama: PreTrainedModel) -> None:
    before = llama.config._attn_implementation
    runner = paged(llama)
    table = runner.pool.new_table()
    runner.forward([Row.of(table, [1, 2, 3], 0, 1)])
    with pytest.raises(InvalidRequest):
        runner.forward([Row.of(table, [1, 2, 3, VOCAB_SIZE], 3, 1)])
    assert llama.config._attn_implementation == before != ATTENTION_NAME


@pytest.mark.parametrize(
    ("model_type", "changes", "limits"),
    [
        ("llama", {}, [(None, None), (None, None)]),
        ("mistral", {"sliding_window": 16}, [(16, None), (16, None)]),
        ("mistral", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, [(16, None), (16, None)]),
        ("llama", {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2}, [(None, None), (None, None)]),
        ("llama4_text", {"attention_chunk_size": 16, "no_rope_layers": [1, 0]}, [(None, 16), (None, None)]),
        (
            "qwen2",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
            [(None, None), (16, None)],
        ),
    ],
)
def test_what_a_layer_sees_is_read_from_the_configuration(
    model_type: str, changes: dict[str, object], limits: list[tuple[int | None, int | None]]
) -> None:
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **changes})
    assert [layer_limits(config, i) for i in range(2)] == limits


def test_a_model_that_changes_its_keys_after_they_are_cached_is_refused() -> None:
    """As a latent model would whose configuration does not say so."""
    config = shrunk("deepseek_v3")
    model = random_model(config, seed=3)
    vars(config)["kv_lora_rank"] = None
    facts = ModelFacts("tiny", VOCAB_SIZE, 128, "float32", "cpu", (), 0)
    with pytest.raises(
        ConfigError, match=r"paged: does not run on this cache, .*: NotImplementedError: the keys are change"
    ):
        choose_path(model, facts, "paged", False)


def test_a_class_whose_attention_cannot_be_replaced_goes_to_the_next_path(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(shrunk("bloom"), seed=3)
    with pytest.raises(PathUnavailable, match="its attention cannot be replaced"):
        PagedPath(model, VOCAB_SIZE)
    facts = ModelFacts("tiny", VOCAB_SIZE, 128, "float32", "cpu", (), 0)
    with caplog.at_level("INFO"):
        assert choose_path(model, facts, "auto", False).path.name == "dense"
    line = next(message for message in caplog.messages if "takes the path" in message)
    assert line.startswith("BloomForCausalLM takes the path dense; not fused: ")
    assert "nor paged: its attention cannot be replaced" in line


@pytest.mark.parametrize("path", ["paged", "dense"])
def test_long_and_short_rows_have_one_set_of_rotary_factors(path: str, tmp_path: Path) -> None:
    """LongRoPE: a row of 20 tokens is the same alone and beside one that is past the length of pretraining."""
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    rope = {**long, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config = CONFIG_MAPPING["phi3"](**SHAPE, rope_parameters=rope, original_max_position_embeddings=32)
    folder = save(random_model(config, seed=3), tmp_path)
    options = {"device": "cpu", "dtype": "auto", "kv_cache_tokens": 1024, "max_slots": 2, "attention_path": path}

    def short_logits(context_limit: int, *, beside: int) -> Tensor:
        runner = load_runner(TargetConfig(model=folder, context_limit=context_limit, **options))
        ids = [some_ids(20, VOCAB_SIZE, 1), some_ids(beside, VOCAB_SIZE, 2)]
        return runner.forward([Row.of(runner.pool.new_table(), some, 0, 1) for some in ids if some])[0]

    alone, beside_long = short_logits(128, beside=0), short_logits(128, beside=100)
    assert (alone - beside_long).abs().max() < TOLERANCE
    assert (alone - short_logits(32, beside=0)).abs().max() > 1e-2  # the short factors, where nothing is long
