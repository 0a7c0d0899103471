"""Heads that join embedding and feature (EAGLE-1, MTP) in every layout, against the forward written straight down."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.head_loader import LoadedHead, load_head
from outrider.engine.heads.joined import JoinedHead, read_eagle1, read_mtp
from outrider.engine.heads.kinds import EAGLE1, MTP, kind_of
from outrider.engine.heads.wiring import ProbeStates, score_head, text_logits
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig
from tests.unit.outrider.engine.heads.joined_layouts import CASES, Made, eagle1, in_target
from tests.unit.outrider.engine.heads.layouts import LAYERS
from tests.unit.outrider.engine.heads.test_eagle3 import TOLERANCE, Served, difference, expected
from tests.unit.outrider.engine.heads.test_wiring import NUM_TOKENS, seen_with


def read(head: str, target: str) -> HeadFiles:
    files = Checkpoint(head)
    kind = kind_of(files, target)
    return (read_mtp if kind is MTP else read_eagle1)(files, TargetFiles(target))


def logits_of(files: HeadFiles) -> Tensor:
    return Served(files, head_class=JoinedHead).all_logits()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Made]:
    return request.param, CASES[request.param](tmp_path_factory.mktemp("joined"))


def test_a_head_computes_what_its_layout_defines(case: tuple[str, Made]) -> None:
    """Prefill, steps and a tree on the paged cache; latent attention caches two things of different widths."""
    name, (head, folder, target) = case
    files = read(folder, target)
    assert files.facts.is_carry_normed == head.carry_normed
    assert files.undecided == (("is_carry_normed",) if name.startswith(("MTP of D", "MTP of G", "MTP of L")) else ())
    assert difference(logits_of(files), expected(head)) < TOLERANCE


def settings(folder: str, **more: Any) -> DraftConfig:
    return DraftConfig(model=folder, device="cpu", max_slots=2, kv_cache_tokens=512, **more)


def test_a_target_lends_its_own_embedding_beside_its_mtp_heads(tmp_path: Path) -> None:
    head, folder, _ = in_target(tmp_path, "llama")
    assert torch.equal(TargetFiles(folder).embedding(), head.whole["model.embed_tokens.weight"])


def test_the_path_fused_is_not_of_these_heads(tmp_path: Path) -> None:
    _, folder, target = eagle1(tmp_path)
    with pytest.raises(ConfigError, match="cannot be served: fused: is not made for EAGLE-1 and 2"):
        load_head(settings(folder, attention_path="fused"), target, EAGLE1)


def blank() -> ProbeStates:
    return seen_with(torch.zeros(NUM_TOKENS - 1, dtype=torch.long))


def sound(name: str, folder: Path) -> tuple[LoadedHead, Tensor]:
    """Return a loaded head, and the ids that it proposes."""
    _, where, target = CASES[name](folder)
    loaded = load_head(settings(where, dtype="float32"), target, kind_of(Checkpoint(where), target))
    return loaded, text_logits(loaded, blank(), (NORMED,)).argmax(-1)


@pytest.mark.parametrize("name", ["EAGLE-1", "MTP of DeepSeek"])
@torch.inference_mode()
def test_a_miswired_head_is_caught(name: str, tmp_path: Path) -> None:
    loaded, best = sound(name, tmp_path)
    outcome = score_head(loaded, seen_with(best))
    assert outcome.fault is None and outcome.configured.agreement == 1.0
    labels = {way.label for way in outcome.others}
    assert labels >= {f"reading the hidden states [{LAYERS}] (-1 = normed)", "with embedding and feature exchanged"}
    assert ("with the norms of embedding and features swapped" in labels) == name.startswith("MTP")
    for label, misread in loaded.network.misreadings():
        facts, loaded.network.facts = loaded.network.facts, misread
        wrong = text_logits(loaded, seen_with(best), (NORMED,)).argmax(-1)
        loaded.network.facts = facts
        found = score_head(loaded, seen_with(wrong))
        assert found.best_other is not None and found.best_other.label == label and found.best_other.agreement == 1.0


@pytest.mark.parametrize("is_normed", [False, True])
@torch.inference_mode()
def test_what_an_mtp_head_carries_is_decided_by_its_second_step(is_normed: bool, tmp_path: Path) -> None:
    loaded, _ = sound("MTP of Llama's layers", tmp_path)
    assert not loaded.network.facts.is_carry_normed
    loaded.network.facts = replace(loaded.network.facts, is_carry_normed=is_normed)
    second = text_logits(loaded, blank(), (NORMED,), ahead=2).argmax(-1)
    loaded.network.facts = replace(loaded.network.facts, is_carry_normed=False)
    seen = seen_with(torch.cat([torch.zeros(1, dtype=torch.long), second]))
    score_head(loaded, seen)
    assert loaded.network.facts.is_carry_normed is is_normed
