"""DSpark heads in every layout: what follows each token of a path, against the forward written straight down."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.dflash import read_dflash
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.kinds import DSPARK, kind_of
from outrider.engine.heads.network import UNMAPPED
from outrider.engine.step_plan import Row
from tests.unit.outrider.engine.heads.block_layouts import BLOCK, MASK, RANK, BlockHead
from tests.unit.outrider.engine.heads.layouts import DRAFT_VOCAB, VOCAB, WIDTH, hidden_states
from tests.unit.outrider.engine.heads.test_dflash import BASE, NUM, TOLERANCE, Case, Served, difference, made

ANCHOR, PATH = 7, [32, 38, 46, 26]
OWN: dict[str, Any] = {"leaves_out": (), "from_anchor": True}
SPARK = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
SPECFORGE: dict[str, Any] = {
    **BASE,
    "architectures": ["DSparkDraftModel"],
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5], "projector_type": "dspark", **SPARK},
}
DEEPSPEC: dict[str, Any] = {**BASE, **SPARK, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK}
DEEPSPEC |= {"mask_token_id": MASK, "target_layer_ids": [-1, 7], "num_anchors": 512}


def apart(kind: str) -> dict[str, Any]:
    """As SpecForge exports it with keys of its own for the sequential head."""
    block = {"mask_token_id": MASK, "target_layer_ids": [1, 5], "projector_type": "dspark"}
    return {**SPECFORGE, "dflash_config": block, "dspark_config": {**SPARK, "markov_head_type": kind}}


def wrapped(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 6],
        "transformer_layer_config": BASE,
        "markov_head_type": kind,
        **SPARK,
        **more,
    }


LENT: dict[str, Any] = {"from_anchor": True}
CASES = {
    "SpecForge": Case({**LENT, "markov": "vanilla"}, SPECFORGE),
    "SpecForge, gated": Case({**LENT, "markov": "gated"}, apart("gated")),
    "SpecForge, rnn": Case({**LENT, "markov": "rnn"}, apart("rnn")),
    "speculators": Case({**OWN, "markov": "vanilla", "draft_vocab": DRAFT_VOCAB}, wrapped("vanilla")),
    "speculators, rnn": Case({**OWN, "markov": "rnn", "draft_vocab": DRAFT_VOCAB}, wrapped("rnn")),
    "speculators, not from the anchor": Case(
        {"markov": "gated", "draft_vocab": DRAFT_VOCAB}, wrapped("gated", sample_from_anchor=False)
    ),
    "a bonus anchor": Case({"markov": "vanilla"}, {**SPECFORGE, "dspark_bonus_anchor": True}),
    "DeepSpec": Case({**OWN, "markov": "vanilla", "taps": (0, 8)}, DEEPSPEC),
    "no sequential head": Case({**OWN, "taps": (0, 8)}, {**DEEPSPEC, "markov_rank": 0}),
}
CONFIDENCE = {"confidence_head.proj.weight": torch.ones(1, WIDTH + RANK), "confidence_head.proj.bias": torch.ones(1)}


def read(case: Case, target_folder: str, folder: Path) -> HeadFiles:
    files = Checkpoint(made(case, target_folder).write(folder, case.config, **CONFIDENCE))
    assert kind_of(files) is DSPARK
    return read_dflash(files, TargetFiles(target_folder), is_dspark=True)


def said(files: HeadFiles, path: list[int]) -> Tensor:
    """Return the logits [len(path) + 1, V] that follow the anchor and each token of a path behind it."""
    served, num = Served(files), len(path) + 1
    table = served.runner.pool.new_table()
    num_logits = files.facts.block.num_drafts
    ids = [*[0] * NUM, *served.block(ANCHOR)]
    logits = served.runner.forward([Row(table, ids, 0, num_logits, [], features=served.rows)])[:num].double()
    return served.head.biased(logits, served.path.hidden[:num], [ANCHOR, *path])


def expected(head: BlockHead, path: list[int]) -> Tensor:
    mapped = head.says(head.rows(hidden_states(NUM)), ANCHOR, path)
    return torch.full((len(mapped), VOCAB), UNMAPPED, dtype=torch.float64).index_copy_(1, head.ids, mapped)


@pytest.mark.parametrize("name", CASES)
def test_a_head_computes_what_its_layout_defines(
    name: str, target_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    with caplog.at_level("INFO"):
        files = read(case, target_folder, tmp_path)
    assert "tensors that are not used, such as confidence_head.proj.bias" in caplog.text
    head = made(case, target_folder)
    path = PATH if head.from_anchor else PATH[:-1]
    assert files.facts.block.num_drafts == len(path) + 1
    assert difference([said(files, path)], [expected(head, path)]) < TOLERANCE
