"""The test of a head's wiring catches what it tries.

A random head is a trained one here: the target says, position by position, what the head as it is meant to be says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import Eagle3Head, read_eagle3
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.head_loader import LoadedHead, load_head
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.kinds import EAGLE3, MEDUSA
from outrider.engine.heads.projection import Projection
from outrider.engine.heads.wiring import MAX_TOKENS, ProbeStates, score_head, taps_to_probe, text_logits
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_runner import ModelRunner
from outrider.wire.settings.config import DraftConfig
from tests.random_heads import random_medusa
from tests.unit.outrider.engine.heads.layouts import LAYERS, SHAPE, VOCAB, Eagle3, hidden_states, target

NUM_TOKENS = 96
FAULTS = (
    *("all taps one lower", "tap 2 alone one lower", "tap 4 alone one lower", "tap 5 alone one lower"),
    *("all taps one higher", "tap 2 alone one higher", "tap 4 alone one higher", "tap 5 alone one higher"),
    *("taps 2 and 4 exchanged", "taps 2 and 5 exchanged", "taps 4 and 5 exchanged"),
    *("norms of embedding and feature swapped", "first residual normed, or not"),
)


@dataclass(frozen=True)
class Sound:
    loaded: LoadedHead
    files: HeadFiles
    seen: ProbeStates


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


def eagle3_faults(files: HeadFiles) -> dict[str, HeadFiles]:
    """What can go wrong with such a head and is tried, by name."""
    taps, found = files.projection.spec.taps, dict[str, HeadFiles]()
    for by, word in ((-1, "lower"), (1, "higher")):
        found[f"all taps one {word}"] = with_taps(files, tuple(tap + by for tap in taps))
        for place, tap in enumerate(taps):
            found[f"tap {tap} alone one {word}"] = with_taps(files, (*taps[:place], tap + by, *taps[place + 1 :]))
    for a, b in combinations(range(len(taps)), 2):
        swapped = list(taps)
        swapped[a], swapped[b] = taps[b], taps[a]
        found[f"taps {taps[a]} and {taps[b]} exchanged"] = with_taps(files, tuple(swapped))
    found["norms of embedding and feature swapped"] = swapped_norms(files)
    found["first residual normed, or not"] = with_residual_turned(files)
    return found


def with_taps(files: HeadFiles, taps: tuple[int, ...]) -> HeadFiles:
    projection = files.projection
    spec = replace(projection.spec, taps=taps)
    return replace(files, facts=replace(files.facts, taps=taps), projection=Projection(spec, projection.tensors))


def swapped_norms(files: HeadFiles) -> HeadFiles:
    one, other = "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
    return replace(files, tensors={**files.tensors, one: files.tensors[other], other: files.tensors[one]})


def with_residual_turned(files: HeadFiles) -> HeadFiles:
    """What the files leave open is then decided, for nothing would be planted."""
    facts = replace(files.facts, norm_before_residual=not files.facts.norm_before_residual)
    undecided = tuple(each for each in files.undecided if each != "norm_before_residual")
    return replace(files, facts=facts, undecided=undecided)


def shuffled(tensors: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors with their numbers in another order: of the same size, and of no meaning."""
    return {
        name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }


def another_head(files: HeadFiles, seed: int) -> HeadFiles:
    """Return a head that was not trained for this target."""
    generator = torch.Generator().manual_seed(seed)
    projection = Projection(files.projection.spec, shuffled(files.projection.tensors, generator))
    return replace(files, tensors=shuffled(files.tensors, generator), projection=projection)


def float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def made(files: HeadFiles, sound: LoadedHead) -> LoadedHead:
    """Return what these files give, without the tests of a load."""
    head = Eagle3Head.of(files.facts, float32(files.tensors))
    path, facts = HeadPath(head), sound.facts
    runner = ModelRunner(path, facts, KVPool(2 * MAX_TOKENS // path.block_size, path.block_size), head.device)
    runner.tree_refusal = None
    return replace(sound, network=head, projection=files.projection, runner=runner, undecided=files.undecided)


def exchanged(seen: ProbeStates) -> ProbeStates:
    """Return what a head sees that reads the last hidden state on the wrong side of the final norm."""
    last = max(seen.taps)
    return replace(seen, taps={**seen.taps, NORMED: seen.taps[last], last: seen.taps[NORMED]})


def test_a_sound_head_passes(sound: Sound) -> None:
    outcome = score_head(sound.loaded, sound.seen)
    assert outcome.fault is None and outcome.configured.agreement == 1.0
    again = score_head(made(sound.files, sound.loaded), sound.seen)
    torch.testing.assert_close(again.configured.scores, outcome.configured.scores, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("label", FAULTS)
def test_a_fault_of_the_files_is_caught(sound: Sound, label: str) -> None:
    outcome = score_head(made(eagle3_faults(sound.files)[label], sound.loaded), sound.seen)
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
