"""A head of EAGLE-3 that learns: the unrolled head against one run entry by entry, and what is saved of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from outrider.engine.heads import wiring
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import Eagle3Config
from outrider.engine.heads.head_loader import load_head
from outrider.engine.heads.kinds import EAGLE3, kind_of
from outrider.engine.loading.loader import load_runner
from outrider.engine.step_plan import Row
from outrider.training.eagle3_student import Eagle3, ProjectedHead, attend_masked, attention_mask
from outrider.training.teacher import Batch, Teacher
from outrider.training.written import Answer
from outrider.wire.settings.config import DraftConfig, TargetConfig
from tests.shrunk import shrunk
from tests.tiny_models import random_model, save, tiny_llama
from tests.unit.outrider.engine.heads import layouts as heads
from tests.unit.outrider.training.tiny_training import says_the_same


@pytest.mark.parametrize("traits", [{}, {"carry_normed": True, "num_layers": 2, "residual_normed": True}])
def test_the_unrolled_head_gives_the_logits_of_each_chain(traits: dict[str, Any]) -> None:
    """Every chain of every length, run by itself, entry by entry, in float64."""
    num_tokens, num_steps = 9, 4
    truth = heads.Eagle3(draft_vocab=heads.VOCAB, **traits)
    facts = Eagle3Config(
        layers=LlamaConfig(**{**heads.SHAPE, "num_hidden_layers": truth.num_layers}),
        width=heads.WIDTH,
        vocab_size=heads.VOCAB,
        draft_vocab_size=heads.VOCAB,
        taps=truth.taps,
        target_width=heads.WIDTH,
        norm_before_residual=truth.residual_normed,
        is_carry_normed=truth.carry_normed,
    )
    module = ProjectedHead(facts)
    tensors = dict(truth.tensors)
    module.fc.load_state_dict({"weight": tensors.pop("fc.weight")})
    module.head.load_state_dict(tensors)
    module.double()
    ids = torch.randint(0, heads.VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(2))
    hidden = heads.hidden_states(num_tokens)  # [n + 1, T, dt]
    taps = torch.stack([hidden[k] for k in truth.taps], dim=1)  # [T, m, dt]
    read = module(ids[None], taps[None], num_steps)
    for step, output in enumerate(read):
        for base in range(num_tokens - 1 - step):
            chain = ids[1 : base + step + 2].tolist()
            logits, _ = truth.carried(truth.rows(hidden)[: base + 1], chain)
            own = module.head.lm_head(output[0, base + step])
            torch.testing.assert_close(own, logits[-1], rtol=1e-5, atol=1e-6)  # rotary angles are float32


def test_heads_that_have_keys_of_their_own_attend_as_groups_do() -> None:
    """As on a GPU, where a kernel that holds no scores takes them so."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, n, 8, generator=generator) for heads, n in ((4, 6), (2, 12), (2, 12)))
    mask = attention_mask(6, 1, torch.device("cpu"))
    own, grouped = (attend_masked(query, key, value, mask, 0.3, repeats_heads=repeats) for repeats in (True, False))
    torch.testing.assert_close(own, grouped)


KEPT = torch.arange(3, 320, 2)
EAGLES: dict[str, tuple[bool, torch.Tensor | None, set[str]]] = {
    "of a tied draft": (True, None, {"embed_tokens.weight"}),
    "of the target": (False, None, {"lm_head.weight"}),
    "with fewer ids": (True, KEPT, {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}),
}


@pytest.mark.parametrize("case", EAGLES)
def test_a_saved_eagle_is_the_one_that_was_trained(
    case: str, folder: Path, teacher: Teacher, target: TargetFiles, answers: list[Answer], tmp_path: Path
) -> None:
    starts, kept, vocabulary = EAGLES[case]
    start = None
    if starts:
        start = str(tmp_path / "draft")
        tiny_llama(start, seed=3, hidden_size=8, num_layers=1, context=64)
        config = Path(start) / "config.json"
        config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    student = Eagle3(ProjectedHead.new(target, start, (0, 2), kept, seed=5), 2, "cpu")
    (tmp_path / "head").mkdir()
    student.save(tmp_path / "head")
    files = Checkpoint(str(tmp_path / "head"))
    assert kind_of(files) is EAGLE3
    assert files.names & {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} == vocabulary
    loaded = Eagle3.load(str(tmp_path / "head"), target, "cpu")
    says_the_same(student, loaded, Batch.of(answers, "cpu"), teacher)
    if kept is not None:
        assert loaded.ids is not None and torch.equal(loaded.ids, kept)


def test_a_head_has_the_rotary_base_of_the_layers_that_see_all(folder: Path) -> None:
    """Where a target's layers have windows of their own, such as Gemma 3's."""
    save(random_model(shrunk("gemma3_text"), seed=1), folder / "windows")
    rope = ProjectedHead.new(
        TargetFiles(str(folder / "windows")), None, (0,), None, seed=5
    ).head.facts.layers.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 1_000_000.0}


@pytest.mark.parametrize("kept", [None, torch.arange(3, 97, 2)])
def test_a_head_gives_the_same_logits_in_serving_as_in_training(
    kept: torch.Tensor | None, folder: Path, tmp_path: Path
) -> None:
    """Of its first token and of one behind its own carry, for Gemma 3: a tied target that scales its embedding, whose
    rows a head reads unscaled. The served target's hidden states are those of its own path.
    """
    gemma = save(random_model(shrunk("gemma3_text"), seed=1), tmp_path / "target")
    student = Eagle3(ProjectedHead.new(TargetFiles(gemma), None, (0, 1), kept, seed=5), 2, "cpu")
    (tmp_path / "head").mkdir()
    student.save(tmp_path / "head")
    ids = [5 + 7 * i % 40 for i in range(40)]  # more than a window
    batch = Batch.of([Answer(np.array(ids, dtype=np.int32), 2, 0.0)], "cpu")
    runner = load_runner(TargetConfig(model=gemma, device="cpu"))
    runner.set_taps((0, 1))
    runner.forward([Row.of(runner.pool.new_table(), ids, 0, 1)])
    taps = dict(enumerate(runner.features.unbind(1)))
    loaded = load_head(DraftConfig(model=str(tmp_path / "head"), device="cpu"), gemma, EAGLE3)
    seen = wiring.ProbeStates(ids, taps, torch.empty(0))
    steps = (wiring.text_logits(loaded, seen, (0, 1)), wiring.text_logits(loaded, seen, (0, 1), ahead=2))
    assert (runner.path.name, loaded.path.name) == ("fused", "fused")
    for guess, logits in zip(student.draft_logits(batch, Teacher(gemma, "cpu").see(batch), 2), steps, strict=True):
        said = logits[guess.token_indices - 1 - guess.depth]
        said = said if kept is None else said[:, kept]
        assert (said - guess.logits).abs().max() < 0.05 * guess.logits.std(), "as far as bfloat16 lets it"
