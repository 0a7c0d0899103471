"""What heads without an embedding of their own read of a target that scales its embedding, Gemma 3."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.dflash import read_dflash
from outrider.engine.heads.eagle3 import Eagle3Head, read_eagle3, read_peagle
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.joined import JoinedHead, read_eagle1
from outrider.engine.heads.network import HeadNetwork
from tests.tiny_models import random_model, save
from tests.unit.outrider.engine.heads import test_dflash, test_dspark, test_peagle
from tests.unit.outrider.engine.heads.block_layouts import BlockHead
from tests.unit.outrider.engine.heads.joined_layouts import eagle1, in_target
from tests.unit.outrider.engine.heads.layouts import LAYERS, SHAPE, VOCAB, WIDTH, Eagle3
from tests.unit.outrider.engine.heads.test_dflash import CLEAR, TOLERANCE, Served, difference
from tests.unit.outrider.engine.heads.test_dflash import expected as expected_of_blocks
from tests.unit.outrider.engine.heads.test_eagle3 import SPECFORGE
from tests.unit.outrider.engine.heads.test_joined import logits_of, read

LEFT_OUT = ("embed_tokens.weight",)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {**SHAPE, "num_hidden_layers": LAYERS, "query_pre_attn_scalar": 16, "sliding_window": 16}
    return save(random_model(CONFIG_MAPPING["gemma3_text"](**config), seed=3), tmp_path_factory.mktemp("gemma"))


@pytest.mark.parametrize(
    ("case", "is_dspark", "scale"),
    [
        pytest.param(test_dflash.CASES["z-lab"], False, WIDTH**0.5, id="z-lab"),
        pytest.param(test_dspark.CASES["SpecForge"], True, WIDTH**0.5, id="DSpark of SpecForge"),
        pytest.param(test_dflash.CASES["speculators, the target's rows"], False, 1.0, id="speculators"),
        pytest.param(test_dflash.Case(test_dflash.ALL, test_dflash.ZLAB), False, 1.0, id="its own"),
    ],
)
def test_a_block_goes_through_the_targets_embedding(
    case: test_dflash.Case, is_dspark: bool, scale: float, target_folder: str, tmp_path: Path
) -> None:
    """As in z-lab's code; speculators' heads are trained over the table."""
    head, lent = BlockHead(**case.head), load_file(Path(target_folder) / "model.safetensors")
    head.adopt({**lent, "lm_head.weight": lent["model.embed_tokens.weight"]})
    files = read_dflash(Checkpoint(head.write(tmp_path, case.config)), TargetFiles(target_folder), is_dspark=is_dspark)
    head.tensors["embed_tokens.weight"] = scale * head.tensors["embed_tokens.weight"]
    assert difference(Served(files).rounds(), expected_of_blocks(head)) < TOLERANCE
    other = replace(files, facts=replace(files.facts, embedding_scale=3.0))
    assert difference(Served(other).rounds(), expected_of_blocks(head)) > CLEAR


def of_eagle1(folder: Path) -> str:
    return eagle1(folder, ("lm_head.weight", *LEFT_OUT))[1]


def of_eagle3(folder: Path) -> str:
    return Eagle3(leaves_out=LEFT_OUT).write(folder, SPECFORGE)


def of_peagle(folder: Path) -> str:
    return test_peagle.made(leaves_out=LEFT_OUT).write(folder, test_peagle.VLLM)


@pytest.mark.parametrize(
    ("write", "read", "head_class"),
    [
        pytest.param(of_eagle1, read_eagle1, JoinedHead, id="EAGLE-1"),
        pytest.param(of_eagle3, read_eagle3, Eagle3Head, id="EAGLE-3"),
        pytest.param(of_peagle, read_peagle, Eagle3Head, id="P-EAGLE"),
    ],
)
def test_heads_that_were_trained_over_the_table_read_it_as_it_is(
    write: Callable[[Path], str],
    read: Callable[[Checkpoint, TargetFiles], HeadFiles],
    head_class: type[HeadNetwork],
    target_folder: str,
    tmp_path: Path,
) -> None:
    """As the original repository, SpecForge and speculators train them."""
    files = read(Checkpoint(write(tmp_path)), TargetFiles(target_folder))
    table = load_file(Path(target_folder) / "model.safetensors")["model.embed_tokens.weight"]
    embedding = head_class.of(files.facts, files.tensors).get_input_embeddings()
    assert torch.equal(embedding(torch.arange(VOCAB)), table)


def test_to_an_mtp_head_a_scale_makes_no_difference(tmp_path: Path) -> None:
    """It norms what it embeds."""
    _, folder, target = in_target(tmp_path, "gemma3_text")
    files = read(folder, target)
    name = "embed_tokens.weight"
    scaled = replace(files, tensors={**files.tensors, name: WIDTH**0.5 * files.tensors[name]})
    shuffled = replace(files, tensors={**files.tensors, name: files.tensors[name].roll(1, 0)})
    logits = logits_of(files)
    assert difference([logits_of(scaled)], [logits]) < 1e-4, "as far as the norm's epsilon goes"
    assert difference([logits_of(shuffled)], [logits]) > CLEAR
