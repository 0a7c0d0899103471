"""The test of a head's wiring catches what it tries, and what the benchmark plants is a fault.

A random head is a trained one here: the target says, position by position, what the head as it is meant to be says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import read_eagle3
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.head_loader import LoadedHead, load_head
from outrider.engine.heads.kinds import EAGLE3, MEDUSA
from outrider.engine.heads.wiring import ProbeStates, score_head, taps_to_probe, text_logits
from outrider.wire.settings.config import DraftConfig
from tests.random_heads import random_medusa
from tests.unit.outrider.engine.heads.layouts import LAYERS, SHAPE, VOCAB, Eagle3, hidden_states, target
from tests.unit.outrider.engine.heads.wiring_faults import Fault, another_head, eagle3_faults, exchanged, made

NUM_TOKENS = 96
FAULTS = (
    *("all taps one lower", "tap 2 alone one lower", "tap 4 alone one lower", "tap 5 alone one lower"),
    *("all taps one higher", "tap 2 alone one higher", "tap 4 alone one higher", "tap 5 alone one higher"),
    *("taps 2 and 4 exchanged", "taps 2 and 5 exchanged", "taps 4 and 5 exchanged"),
    *("norms of embedding and feature swapped", "norm of the embedding left out", "norm of the feature left out"),
    *("norm before the lm_head left out", "first residual normed, or not", "carry normed, or not"),
    *("norm of the taps left out", "d2t taken as absolute ids"),
)


@dataclass(frozen=True)
class Sound:
    loaded: LoadedHead
    files: HeadFiles
    seen: ProbeStates

    def said(self, loaded: LoadedHead) -> Tensor:
        """Return the logits of a head at every position, and of the step behind each."""
        first = text_logits(loaded, self.seen, loaded.projection.spec.taps)
        return torch.cat([first, text_logits(loaded, self.seen, loaded.projection.spec.taps, ahead=2)])


def seen_with(best: Tensor, num_tokens: int = NUM_TOKENS) -> ProbeStates:
    """Return random states, and a target that says after the tokens from the second on what `best` [T - 1] is."""
    hidden = hidden_states(num_tokens).float()
    ids = torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(4)).tolist()
    taps = {**{tap: hidden[tap] for tap in range(LAYERS + 1)}, NORMED: hidden[LAYERS].roll(1, -1)}  # as large
    return ProbeStates(ids, taps, torch.cat([torch.zeros(1, dtype=torch.long), best]))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("wiring")
    narrow, truth = target(folder / "target"), Eagle3(projection_norm="each")
    config = {**SHAPE, "num_hidden_layers": 1, "draft_vocab_size": truth.draft_vocab, "fc_norm": True}
    head = truth.write(folder / "head", config)
    loaded = load_head(DraftConfig(model=head, device="cpu", dtype="float32"), narrow, EAGLE3)
    blank = seen_with(torch.zeros(NUM_TOKENS - 1, dtype=torch.long))
    with torch.inference_mode():
        best = text_logits(loaded, blank, loaded.projection.spec.taps).argmax(-1)
    return Sound(loaded, read_eagle3(Checkpoint(head), TargetFiles(narrow)), seen_with(best))


def planted(sound: Sound, label: str) -> tuple[Fault, LoadedHead]:
    fault = next(fault for fault in eagle3_faults(sound.files, LAYERS) if fault.label == label)
    loaded = made(fault.in_files(sound.files), sound.loaded)
    fault.in_head(loaded.network)
    return fault, loaded


def test_a_sound_head_passes(sound: Sound) -> None:
    outcome = score_head(sound.loaded, sound.seen)
    assert outcome.fault is None and outcome.configured.agreement == 1.0
    again = score_head(made(sound.files, sound.loaded), sound.seen)
    torch.testing.assert_close(again.configured.scores, outcome.configured.scores, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("label", FAULTS)
@torch.inference_mode()
def test_a_planted_fault_changes_the_head_s_logits_and_is_caught_where_it_is_tried(sound: Sound, label: str) -> None:
    fault, loaded = planted(sound, label)
    assert not torch.allclose(sound.said(loaded), sound.said(sound.loaded), rtol=1e-2, atol=1e-2)
    if fault.is_tried:
        outcome = score_head(loaded, sound.seen)
        assert outcome.best_other is not None and outcome.best_other.agreement == 1.0
        assert outcome.configured.agreement < 0.9


def test_a_head_of_another_target_is_caught(sound: Sound) -> None:
    other = made(another_head(sound.files, seed=1), sound.loaded)
    assert score_head(other, sound.seen).fault is not None


def test_medusa_before_the_final_norm_is_caught(tmp_path: Path) -> None:
    narrow = target(tmp_path / "target")
    loaded = load_head(
        DraftConfig(model=random_medusa(narrow, tmp_path / "heads"), device="cpu", dtype="float32"), narrow, MEDUSA
    )
    blank = seen_with(torch.zeros(NUM_TOKENS - 1, dtype=torch.long))
    best = loaded.network(blank.taps[NORMED][:-1].to(torch.bfloat16))[:, 0].argmax(-1)
    seen = seen_with(best)
    assert score_head(loaded, seen).fault is None
    found = score_head(loaded, exchanged(seen))
    assert (
        found.best_other is not None and found.best_other.label == f"reading the hidden states [{LAYERS}] (-1 = normed)"
    )


@pytest.mark.parametrize(
    ("taps", "num_layers", "wanted"),
    [
        ((1, 3, 5), 6, [0, 1, 2, 3, 4, 5, 6]),
        ((0, 4), 4, [NORMED, 0, 1, 3, 4]),
        ((2,), 4, [1, 2, 3]),
        ((NORMED,), 4, [NORMED, 4]),
        ((1, NORMED), 4, [NORMED, 0, 1, 2, 4]),
    ],
)
def test_what_a_test_needs_of_the_target(taps: tuple[int, ...], num_layers: int, wanted: list[int]) -> None:
    assert taps_to_probe(taps, num_layers) == wanted
