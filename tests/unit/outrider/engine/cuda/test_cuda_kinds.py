"""Every kind of draft and of drafter of a target, and every path, loads on the fake CUDA device and takes rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafting.translation import create_translation
from outrider.engine.attention.varlen_attention import torch_refusal
from outrider.engine.heads.wiring import WiringScores
from outrider.engine.sampling.grammar_state import Grammars
from outrider.engine.worker.jobs import SlotVocabulary
from outrider.wire.requests.drafters import Drafter
from tests import random_heads
from tests.other_tokenizers import byte_level, digits_apart
from tests.shrunk import shrunk
from tests.tiny_models import perturbed_copy, random_model, save, tiny_llama, tiny_t5
from tests.unit.outrider.engine.cuda.cuda_cases import (
    COUPLED,
    DRAWN,
    GREEDY,
    GROWING,
    TREE,
    Case,
    check,
    opened,
    rounds,
)
from tests.unit.outrider.engine.cuda.cuda_pair import Pair
from tests.unit.outrider.engine.cuda.fake_cuda import FakeCuda

SIZES: dict[str, Any] = {"max_slots": 4, "context_limit": 256}
FEATURES = ("features:_project",)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("target"), sharpness=3.0)


def blockwise(target: str, folder: Path) -> str:
    random_heads.random_medusa(target, folder)
    tensors = load_file(folder / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if ".1." not in name}
    save_file(own, folder / "model.safetensors")
    return str(folder)


def dspark(kind: str) -> Callable[[str, Path], str]:
    return lambda target, folder: random_heads.random_dflash(target, folder, markov=kind)


HEADS: dict[str, tuple[Callable[[str, Path], str], str]] = {
    "EAGLE-1": (random_heads.random_eagle1, "ModelDrafter"),
    "EAGLE-3": (random_heads.random_eagle3, "ModelDrafter"),
    "MTP": (random_heads.random_mtp, "ModelDrafter"),
    "P-EAGLE": (random_heads.random_peagle, "MaskDrafter"),
    "Medusa": (random_heads.random_medusa, "MedusaDrafter"),
    "blockwise": (blockwise, "MedusaDrafter"),
    "DFlash": (random_heads.random_dflash, "MaskDrafter"),
    "DSpark, vanilla": (dspark("vanilla"), "SequentialDrafter"),
    "DSpark, gated": (dspark("gated"), "SequentialDrafter"),
    "DSpark, rnn": (dspark("rnn"), "SequentialDrafter"),
}


def take_rounds(device: FakeCuda, pair: Pair, *cases: Case) -> None:
    for case in cases:
        with opened(pair, case):
            check(case, rounds(device, pair, case))


@pytest.mark.parametrize("name", HEADS)
def test_heads_draft(device: FakeCuda, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, drafter = HEADS[name]
    folder = make(target, tmp_path / "head")
    of_target = folder if name == "MTP" else target
    pair = Pair(monkeypatch, folder, of_target, device="cuda", of_draft={"target_model": of_target}, **SIZES)
    assert type(pair.draft.worker._drafter).__name__ == drafter
    assert isinstance(pair.test_wiring(), WiringScores)
    take_rounds(
        device, pair, Case("growing, greedy", GREEDY, GROWING, later=FEATURES), Case("T = 1", DRAWN, later=FEATURES)
    )


def test_a_model_that_fills_masks_drafts(
    device: FakeCuda, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = random_heads.random_pard(tmp_path / "draft", 320)
    pair = Pair(monkeypatch, draft, target, device="cuda", **{**SIZES, "context_limit": 64})
    assert type(pair.draft.worker._drafter).__name__ == "MaskDrafter"
    take_rounds(device, pair, Case("greedy", GREEDY), Case("T = 1", DRAWN))


def test_a_draft_of_another_tokenizer_drafts(device: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for name, tokenizer in (("draft", digits_apart()), ("target", byte_level())):
        folders.append(tiny_llama(tmp_path / name, tokenizer.get_vocab_size(), sharpness=3.0))
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    pair = Pair(monkeypatch, *folders, device="cuda", **SIZES)
    own, other = pair.draft.base.loaded, pair.target.base.loaded
    jsons = other.tokenizer.tokenizer_json, own.tokenizer.tokenizer_json
    ends = tuple(other.info().eos_token_ids)
    size = other.info().vocab_size
    translation = create_translation(*jsons, size, own.info().vocab_size, own.info().eos_token_ids)
    grammars = Grammars(jsons[0], size, ends, must_follow=False)
    vocabulary = SlotVocabulary(size, ends, grammars, translation)
    take_rounds(
        device,
        pair,
        Case("growing, greedy", GREEDY, GROWING, vocabulary=vocabulary),
        Case("growing, coupled", COUPLED, GROWING, vocabulary=vocabulary),
    )


@pytest.mark.parametrize("drafter", [Drafter.HEADS, Drafter.PASS])
def test_a_target_drafts_by_itself(
    device: FakeCuda, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: Drafter
) -> None:
    if drafter is Drafter.HEADS:
        own = {"heads": random_heads.random_medusa(target, tmp_path / "own"), "trust_draft_config": True}
    else:
        own = {"lookahead_embeddings": random_heads.random_lookahead(target, tmp_path / "own")}
    pair = Pair(monkeypatch, target, target, device="cuda", of_target=own, **SIZES)
    later = (*FEATURES, "own_heads:_run_heads") if drafter is Drafter.HEADS else ("pass_drafter:propose",)
    case = Case("own", GREEDY, GROWING, {"drafter": drafter}, is_drafted=False, later=later, brings_logits=True)
    take_rounds(device, pair, case)


def test_steps_on_the_flash_path_are_captured(
    device: FakeCuda, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = torch_refusal(torch.__version__)
    if refusal is not None:
        pytest.skip(refusal)
    draft = perturbed_copy(target, tmp_path / "draft", 0.2)
    flash = {"device": "cuda", "dtype": "bfloat16", "attention_path": "flash", "kv_cache_tokens": 16 * 256}
    pair = Pair(monkeypatch, draft, target, **flash, **SIZES)
    assert pair.target.worker._runner.path._graphs.shapes
    take_rounds(device, pair, Case("greedy", GREEDY), Case("T = 1", DRAWN), Case("coupled", COUPLED))


def test_rounds_on_the_dense_path(
    device: FakeCuda, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = perturbed_copy(target, tmp_path / "draft", 0.2)
    pair = Pair(monkeypatch, draft, target, device="cuda", attention_path="dense", **SIZES)
    take_rounds(device, pair, Case("greedy", GREEDY), Case("tree", GREEDY, TREE), Case("T = 1", DRAWN))


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "llama4_text", "bloom")),
    ],
)
def test_models_of_other_kinds_take_rounds(
    device: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Windows and soft caps, latent attention and experts, sinks, chunks, ALiBi."""
    folder = save(random_model(shrunk(name), seed=3), tmp_path)
    pair = Pair(monkeypatch, folder, folder, device="cuda", **{**SIZES, "context_limit": 128})
    take_rounds(device, pair, Case("greedy", GREEDY), Case("tree", GREEDY, TREE))


def test_models_with_an_encoder_take_rounds(device: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_t5(tmp_path / "target")
    draft = perturbed_copy(target, tmp_path / "draft", 0.1)
    pair = Pair(monkeypatch, draft, target, device="cuda", **SIZES)
    source_ids = (5, 9, 300, 41, 7)
    greedy = Case("greedy", GREEDY, source_ids=source_ids)
    take_rounds(device, pair, greedy, Case("T = 1", DRAWN, source_ids=source_ids))
