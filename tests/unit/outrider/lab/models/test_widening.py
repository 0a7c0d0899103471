"""A head that was widened with its target says what it said: benchmarks measure its acceptance on a dearer target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.widen_head import widen_head
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import Eagle3Head, read_eagle3
from outrider.engine.heads.medusa import MedusaHeads, read_medusa
from outrider.lab.models.widening import Sizes, WideningError, widen
from tests.random_heads import random_medusa
from tests.unit.outrider.engine.heads.layouts import SHAPE, VOCAB, WIDTH, Eagle3, target

SIZES = Sizes(hidden=96, intermediate=128, heads=6, kv_heads=3, extra_layers=2)
IDS = [3, 17, 42, 5, 96, 1, 8, 60, 33]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The folders of a target and of the same one widened."""
    folder = tmp_path_factory.mktemp("widened")
    narrow = Path(target(folder / "narrow"))
    widen(LlamaForCausalLM.from_pretrained(narrow), SIZES).save_pretrained(folder / "wide")
    return narrow, folder / "wide"


@torch.inference_mode()
def states(model: Path) -> tuple[Tensor, ...]:
    """Return the taps 0 to n - 1 and the one after the final norm, [T, dt] each."""
    network = LlamaForCausalLM.from_pretrained(model)
    return tuple(each[0] for each in network(torch.tensor([IDS]), output_hidden_states=True).hidden_states)


def said_by_eagle3(head: Path, model: Path) -> Tensor:
    """Return the logits [T - 1, V] of a head over what its target says of some ids."""
    read, hidden = read_eagle3(Checkpoint(str(head)), TargetFiles(str(model))), states(model)
    rows = read.opening.exact(torch.stack([hidden[tap] for tap in read.facts.taps], dim=1))
    network = Eagle3Head.of(read.facts, read.tensors)
    logits: Tensor = network(torch.tensor([IDS[1:]]), rows[None, :-1]).logits[0]
    return logits


def said_by_medusa(head: Path, model: Path) -> Tensor:
    read = read_medusa(Checkpoint(str(head)), TargetFiles(str(model)))
    logits: Tensor = MedusaHeads.of(read.facts, read.tensors)(states(model)[-1])
    return logits


def eagle3(folder: Path, config: dict[str, Any], **traits: Any) -> Path:
    made = Eagle3(**traits)
    return Path(made.write(folder, {"draft_vocab_size": made.draft_vocab, **SHAPE, "num_hidden_layers": 1, **config}))


def medusa(folder: Path) -> Path:
    """Write heads over the target's projection."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{head}.0.linear.{kind}": torch.randn(shape, generator=generator) / 8
        for head in range(2)
        for kind, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"medusa_num_heads": 2}')
    return folder


CASES: dict[str, tuple[Callable[[Path, Path], Tensor], Callable[[Path, Path], Path]]] = {
    "eagle3, default taps, reduced": (said_by_eagle3, lambda folder, _: eagle3(folder, {})),
    "eagle3, SpecForge's taps, the target's embedding": (
        said_by_eagle3,
        lambda folder, _: eagle3(
            folder,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}},
            taps=(1, 4, 7),
            leaves_out=("embed_tokens.weight",),
        ),
    ),
    "medusa, own projections": (said_by_medusa, lambda folder, narrow: Path(random_medusa(str(narrow), folder))),
    "medusa, the target's projection": (said_by_medusa, lambda folder, _: medusa(folder)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_widened_head_says_of_the_widened_target_what_it_said_of_the_other(
    name: str, pair: Pair, tmp_path: Path
) -> None:
    said, made = CASES[name]
    narrow, wide = pair
    head = made(tmp_path / "head", narrow)
    widen_head(head, narrow, wide, tmp_path / "wide")
    before, after = said(head, narrow), said(tmp_path / "wide", wide)
    assert before.shape[-1] == VOCAB and before.std() > 0.1
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_widened_is_refused(pair: Pair, tmp_path: Path) -> None:
    narrow, wide = pair
    with pytest.raises(WideningError, match="norms the hidden states"):
        widen_head(eagle3(tmp_path / "normed", {}, opening_norm="each"), narrow, wide, tmp_path / "out")
    with pytest.raises(WideningError, match="holds a model"):
        widen_head(narrow, narrow, wide, tmp_path / "out")
