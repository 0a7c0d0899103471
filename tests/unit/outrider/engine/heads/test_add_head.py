"""A new kind of head is a file with its network and its reader, a row of the table, and a test.

The head of this test has a KV cache of its own and proposes a block: one layer of a block over the features of the
committed tokens. Below are the file and the row; the test has real workers draft and verify with it.
docs/add-a-head.md leads through it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from draft_service.drafters.block_drafter import MaskDrafter
from outrider.engine.heads import kinds
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_files import HeadFiles, HeadReader
from outrider.engine.heads.kinds import HeadKind, kind_of
from outrider.engine.heads.llama_head import LlamaFacts, LlamaHead
from outrider.engine.heads.network import BlockHead, BlockShape
from outrider.engine.heads.projection import Projection, ProjectionSpec
from outrider.wire.errors import ConfigError
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from tests.tiny_models import tiny_llama
from tests.unit.outrider.engine.cuda.cuda_pair import Pair

# The file: network and reader.


@dataclass(frozen=True, slots=True, kw_only=True)
class GlanceConfig(LlamaFacts):
    block: BlockShape


class GlanceHead(LlamaHead, BlockHead):
    """A block's tokens attend once to the features of the committed tokens and to each other; their embeddings count
    twice.
    """

    facts: GlanceConfig

    def __init__(self, facts: GlanceConfig) -> None:
        super().__init__(facts)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(self.config, 0)])

    @property
    def block(self) -> BlockShape:
        return self.facts.block

    def fill(self, input_ids: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        embedded = self.embed_tokens(input_ids)  # [1, T, d]
        rotary = self.rotary_emb(embedded, position_ids)
        output = self.layers[0](embedded, past_key_values=cache, position_embeddings=rotary, is_causal=False)
        return embedded + output


def read_glance(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read a head for that target. Raises ConfigError for what is missing, unknown or does not fit, by its name."""
    reader = HeadReader(files, target)
    taps = reader.taps({"hidden_states": (files.config.get("hidden_states"), 0)}, (target.num_layers,))
    size = reader.number("block_size", min_value=2, max_value=64)
    mask_id = reader.number("mask_token_id", min_value=0, max_value=target.vocab_size - 1)
    block = BlockShape(size, mask_id, from_anchor=False)
    facts = GlanceConfig(**reader.llama_facts(reader.layers(), taps), block=block)
    projection = Projection(ProjectionSpec(taps, facts.width), {"fc": reader.tensors.pop("fc.weight")})
    return reader.complete(facts, GlanceHead, projection)


# The row.

GLANCE = HeadKind(
    name="glance", label="glance heads", network=GlanceHead, read=read_glance, signs={"architectures": "GlanceHead"}
)

# The test.

VOCAB_SIZE, BLOCK, NUM_TOKENS = 24, 4, 48
PROMPTS = ([3, 14, 15, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3])


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (GLANCE, *kinds.KINDS))


@pytest.fixture
def target(tmp_path: Path) -> str:
    return tiny_llama(tmp_path / "target", VOCAB_SIZE, sharpness=1.5)


def write_head(target: str, folder: Path, **config: Any) -> str:
    """Write a random head, which leaves the embedding and the lm_head to its target; return its folder."""
    width, generator = TargetFiles(target).width, torch.Generator().manual_seed(8)
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, width), "norm": (width,)}
    shapes |= {f"layers.0.self_attn.{name}_proj": (width, width) for name in "qkvo"}
    shapes |= {f"layers.0.self_attn.{name}_norm": (width // 2,) for name in "qk"}
    shapes |= {f"layers.0.mlp.{name}_proj": (width, width) for name in ("gate", "up", "down")}
    shapes |= {f"layers.0.{name}_layernorm": (width,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) / width**0.5 for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    written = {
        "architectures": ["GlanceHead"],
        "hidden_states": [TargetFiles(target).num_layers],
        "block_size": BLOCK,
        "mask_token_id": VOCAB_SIZE - 1,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(written))
    return str(folder)


def output_of(pair: Pair, *, is_drafted: bool) -> tuple[list[list[int]], int, int]:
    """Return the tokens after each prompt, greedily, and how many draft tokens were verified and accepted."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        pair.open(number, prompt, params, Speculation(BLOCK - 1, BLOCK - 1), is_drafted=is_drafted)
    num_drafted = num_accepted = 0
    while not all(slot.is_done for slot in pair.slots.values()):
        for verdict in pair.round().values():
            num_drafted += verdict.num_drafted
            num_accepted += verdict.num_accepted
    outputs = [slot.output for slot in pair.slots.values()]
    pair.close_all()
    return outputs, num_drafted, num_accepted


def test_a_new_head_drafts_for_its_target(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_head(target, tmp_path / "head")
    assert kind_of(Checkpoint(folder)) is GLANCE
    pair = Pair(monkeypatch, folder, target, of_draft={"target_model": target}, device="cpu", max_slots=2)
    assert isinstance(pair.draft.worker._drafter, MaskDrafter)
    state = pair.draft.base.loaded
    assert state.info().kv_bytes_per_token > 0 and state.info().attention_path == "paged"
    labels = {way.label for way in pair.test_wiring().others}
    assert "reading the hidden states [-1] (-1 = normed)" in labels
    plain, *_ = output_of(pair, is_drafted=False)
    drafted, num_drafted, num_accepted = output_of(pair, is_drafted=True)
    assert drafted == plain and num_drafted > NUM_TOKENS and num_accepted > 0
    assert state.head.runner.pool.num_in_use == 0


def test_files_of_a_new_head_that_do_not_fit_are_refused_by_name(target: str, tmp_path: Path) -> None:
    folder = write_head(target, tmp_path / "head", mask_token_id=VOCAB_SIZE)
    with pytest.raises(ConfigError, match=f"mask_token_id of .* is {VOCAB_SIZE}, must be a whole number from 0 to 23"):
        read_glance(Checkpoint(folder), TargetFiles(target))
