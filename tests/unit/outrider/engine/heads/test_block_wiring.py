"""The test of a block head's wiring catches what it tries. A random head is a trained one here, as in `test_wiring`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.head_loader import LoadedHead, load_head
from outrider.engine.heads.kinds import DFLASH, DSPARK
from outrider.engine.heads.projection import Projection
from outrider.engine.heads.wiring import ProbeStates, score_head, text_logits
from outrider.wire.settings.config import DraftConfig
from tests.unit.outrider.engine.heads.block_layouts import BLOCK, BlockHead
from tests.unit.outrider.engine.heads.layouts import LAYERS, target
from tests.unit.outrider.engine.heads.test_dflash import ZLAB
from tests.unit.outrider.engine.heads.test_dspark import apart
from tests.unit.outrider.engine.heads.test_wiring import NUM_TOKENS, seen_with


@dataclass(frozen=True)
class Sound:
    loaded: LoadedHead
    seen: ProbeStates
    folder: Path
    """Of target and head."""
    truth: BlockHead
    config: dict[str, Any]

    def other(self, **config: Any) -> LoadedHead:
        """Return the same tensors under another configuration."""
        return _load(self.folder, self.truth, {**self.config, **config})


def _load(folder: Path, truth: BlockHead, config: dict[str, Any]) -> LoadedHead:
    settings = DraftConfig(model=truth.write(folder / "head", config), device="cpu", dtype="float32")
    kind = DFLASH if truth.markov is None else DSPARK
    return load_head(settings, str(folder / "target"), kind)


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("wiring")
    target(folder / "target")
    is_dspark = request.param == "dspark"
    truth = BlockHead(leaves_out=(), from_anchor=is_dspark, markov="rnn" if is_dspark else None)
    config = apart("rnn") if is_dspark else ZLAB
    loaded, blank = _load(folder, truth, config), seen_with(torch.zeros(NUM_TOKENS - 1, dtype=torch.long))
    return Sound(loaded, told(said(loaded, blank)), folder, truth, config)


def told(logits: Tensor) -> ProbeStates:
    """Return random states, and a target that says what logits [T - 2, V] of the third token on say."""
    return seen_with(torch.cat([logits.argmax(-1), torch.zeros(1, dtype=torch.long)]))


@torch.inference_mode()
def said(loaded: LoadedHead, seen: ProbeStates) -> Tensor:
    """Return the logits [T - 2, V] as configured."""
    return text_logits(loaded, seen, loaded.projection.spec.taps)


def test_logits_of_a_text_are_those_of_blocks(sound: Sound) -> None:
    """Against the forward written straight down, over the rows as they travel."""
    hidden = torch.stack([sound.seen.taps[tap] for tap in range(LAYERS + 1)]).double()
    rows, ids = sound.truth.rows(hidden).to(torch.bfloat16).double(), list(sound.seen.token_ids)
    shape = sound.loaded.network.block
    assert shape is not None
    logits, num = said(sound.loaded, sound.seen), shape.num_drafts
    for anchor in (1, 1 + num, 1 + 3 * num):
        block = sound.truth.says(rows[:anchor], ids[anchor], ids[anchor + 1 : anchor + num])
        ours = logits[anchor - 1 : anchor - 1 + num]
        assert (ours - block).abs().max() < 2e-2 * block.abs().max()  # of rows that were rounded


def test_a_sound_head_passes_and_leaves_nothing(sound: Sound) -> None:
    outcome = score_head(sound.loaded, sound.seen)
    assert outcome.fault is None and outcome.configured.agreement == 1.0
    assert len(outcome.configured.scores) == NUM_TOKENS - 2
    assert sound.loaded.runner is not None and sound.loaded.runner.pool.num_in_use == 0


def with_taps(loaded: LoadedHead, *taps: int) -> LoadedHead:
    return replace(loaded, projection=Projection(replace(loaded.projection.spec, taps=taps), loaded.projection.tensors))


@pytest.mark.parametrize("taps", [(1, 5), (3, 7), (2, 7), (6, 2)])
def test_other_taps_are_caught(sound: Sound, taps: tuple[int, ...]) -> None:
    found = score_head(with_taps(sound.loaded, *taps), sound.seen)
    assert found.best_other is not None and found.best_other.agreement == 1.0
    assert found.best_other.label == "reading the hidden states [2, 6] (-1 = normed)"


@pytest.mark.parametrize(("trained", "read"), [(LAYERS, NORMED), (NORMED, LAYERS)])
def test_the_wrong_side_of_the_final_norm_is_caught(sound: Sound, trained: int, read: int) -> None:
    seen = told(said(with_taps(sound.loaded, 2, trained), sound.seen))
    found = score_head(with_taps(sound.loaded, 2, read), seen)
    assert found.best_other is not None and found.best_other.agreement == 1.0
    assert found.best_other.label == f"reading the hidden states [2, {trained}] (-1 = normed)"


def test_a_place_that_is_off_by_one_is_caught(sound: Sound) -> None:
    is_dspark = sound.truth.markov is not None
    size = BLOCK + 1 if is_dspark else BLOCK - 1
    other = sound.other(sample_from_anchor=not is_dspark, block_size=size)
    shape, sound_shape = other.network.block, sound.loaded.network.block
    assert shape is not None and sound_shape is not None and shape.num_drafts == sound_shape.num_drafts
    found = score_head(other, sound.seen)
    assert found.best_other is not None and found.best_other.label.startswith("reading one place")
    assert found.best_other.agreement == 1.0 and found.configured.agreement < 0.9


def test_a_norm_that_is_too_much_is_caught(sound: Sound) -> None:
    """A target that says what the head without the norm says."""
    projection = sound.loaded.projection
    assert projection.fc is not None
    tensors = {**projection.tensors, "fc": 8 * projection.fc}  # which the norm takes back
    normed = replace(sound.loaded, projection=Projection(projection.spec, tensors))
    spec = replace(projection.spec, norms_output=False)
    bare = replace(sound.loaded, projection=Projection(spec, {"fc": tensors["fc"]}))
    found = score_head(normed, told(said(bare, sound.seen)))
    assert found.best_other is not None and found.best_other.label == "with the norm of the rows left out"
