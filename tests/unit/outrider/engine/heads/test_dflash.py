"""DFlash heads in every layout, against the forward written straight down; each fault of a reader changes the logits.

Everything runs in float64 and ends in float32, hence the tolerance.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.dflash import DFlashHead, read_dflash
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.kinds import DFLASH, kind_of
from outrider.engine.heads.network import UNMAPPED
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from tests.unit.outrider.engine.heads.block_layouts import BLOCK, MASK, BlockHead, default_taps
from tests.unit.outrider.engine.heads.layouts import DRAFT_VOCAB, LAYERS, SHAPE, VOCAB, hidden_states

TOLERANCE = 1e-6
"""Largest difference, as a share of the largest logit."""
CLEAR = 1e-2
"""Least difference that a planted fault makes."""
BASE: dict[str, Any] = {**SHAPE, "model_type": "qwen3", "num_hidden_layers": 2, "num_target_layers": LAYERS}
ZLAB: dict[str, Any] = {
    **BASE,
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5]},
}
NESTED = {**ZLAB, "block_size": None, "dflash_config": {**ZLAB["dflash_config"], "block_size": BLOCK}}
WINDOW: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 4,
}
NUM = 14
"""Rows; the token behind them is an anchor."""


def wrapped(layer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 6],
        "transformer_layer_config": {**BASE, **layer},
        **more,
    }


@dataclass(frozen=True)
class Case:
    """A head and the files that say it."""

    head: dict[str, Any]
    config: dict[str, Any]


ALL = {"leaves_out": ()}
CASES = {
    "z-lab": Case({}, {**ZLAB, "output_multiplier": 1.0}),
    "block size beside the mask": Case({}, NESTED),
    "default layers": Case(
        {"taps": default_taps(2)}, {**ZLAB, "dflash_config": {"mask_token_id": MASK}, "rope_theta": 10000.0}
    ),
    "a window": Case({"windows": (4, None), "causal": (True, False)}, {**ZLAB, **WINDOW}),
    "a window both ways": Case({"windows": (4, None)}, {**ZLAB, **WINDOW, "is_causal": False}),
    "causal": Case({"causal": (True, True)}, {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "causal": True}}),
    "labels shifted": Case({"from_anchor": True}, {**ZLAB, "sample_from_anchor": True}),
    "speculators": Case({**ALL, "draft_vocab": DRAFT_VOCAB, "theta": 5e5}, wrapped({"rope_theta": 5e5})),
    "speculators, the target's rows": Case({"draft_vocab": DRAFT_VOCAB}, wrapped({})),
    "speculators, windows": Case(
        {**ALL, "draft_vocab": DRAFT_VOCAB, "windows": (4, None)}, wrapped(WINDOW, sliding_window_non_causal=True)
    ),
}


def made(case: Case, target_folder: str) -> BlockHead:
    head = BlockHead(**case.head)
    head.adopt(load_file(Path(target_folder) / "model.safetensors"))
    return head


def read(case: Case, target_folder: str, folder: Path) -> HeadFiles:
    files = Checkpoint(made(case, target_folder).write(folder, case.config))
    assert kind_of(files) is DFLASH
    return read_dflash(files, TargetFiles(target_folder), is_dspark=False)


class Served:
    """What was read, run as the product does: features by the projection, the head on its path, in float64."""

    def __init__(self, files: HeadFiles) -> None:
        tensors = {name: t.double() if t.is_floating_point() else t for name, t in files.tensors.items()}
        self.head = DFlashHead.of(files.facts, tensors)
        self.facts = files.facts
        facts = ModelFacts("head", VOCAB, 128, "float64", "cpu", (), 0)
        self.path = HeadPath(self.head)
        self.runner = ModelRunner(self.path, facts, KVPool(16, self.path.block_size), torch.device("cpu"))
        taps = [hidden_states(NUM)[tap] for tap in files.facts.taps]
        self.rows = files.projection.double().exact(torch.stack(taps, dim=1))  # [NUM, d]

    def block(self, anchor: int) -> list[int]:
        return self.facts.block.token_ids(anchor, BLOCK + 1)

    def row(self, table: Any, start: int, end: int, anchor: int | None) -> Row:
        """Of the rows from start to end, and a block behind them where there is an anchor."""
        block = [] if anchor is None else self.block(anchor)
        num_logits = min(len(block), self.facts.block.num_drafts)
        return Row(table, [*[0] * (end - start), *block], start, num_logits, [0] * start, features=self.rows[start:end])

    def rounds(self) -> list[Tensor]:
        """Rows in two pieces, a block behind 9, the next behind 11 beside another slot's, one behind nothing."""
        table, other = self.runner.pool.new_table(), self.runner.pool.new_table()
        assert not len(self.runner.forward([self.row(table, 0, 4, None)]))
        found = [self.runner.forward([self.row(table, 4, 9, 7)])]
        table.truncate(9)
        both = self.runner.forward([self.row(other, 0, NUM, 8), self.row(table, 9, 11, 9)])
        other.free()
        found += both.split(self.facts.block.num_drafts)
        found.append(self.runner.forward([self.row(other, 0, 0, 10)]))
        return found


def expected(head: BlockHead) -> list[Tensor]:
    """As `Served.rounds`."""
    rows, found = head.rows(hidden_states(NUM)), []
    for num, anchor in ((9, 7), (NUM, 8), (11, 9), (0, 10)):
        logits = head.forward(rows[:num], [anchor, *[MASK] * (BLOCK - 1)])[0][0 if head.from_anchor else 1 :]
        whole = torch.full((len(logits), VOCAB), UNMAPPED, dtype=torch.float64)
        found.append(whole.index_copy_(1, head.ids, logits))
    return found


def difference(logits: list[Tensor], truth: list[Tensor]) -> float:
    """The largest, as a share of the largest logit; a row that only one of them has counts as all of it."""
    ours, theirs = torch.cat(logits), torch.cat(truth)
    has = theirs > UNMAPPED / 2
    if ours.shape != theirs.shape or not torch.equal(ours > UNMAPPED / 2, has):
        return 1.0
    return float((ours - theirs)[has].abs().max() / theirs[has].abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_head_computes_what_its_layout_defines(name: str, target_folder: str, tmp_path: Path) -> None:
    served = Served(read(CASES[name], target_folder, tmp_path))
    assert difference(served.rounds(), expected(made(CASES[name], target_folder))) < TOLERANCE
    free = served.head(torch.tensor([served.block(7)]), served.rows[None, :9]).logits[0]
    assert (
        difference([free[-served.facts.block.num_drafts :]], expected(made(CASES[name], target_folder))[:1]) < TOLERANCE
    )


def test_rows_that_begin_late_are_those_of_a_shorter_text(target_folder: str, tmp_path: Path) -> None:
    """What is missing before is not seen; where the text begins makes no difference to what is."""
    served, head = Served(read(CASES["z-lab"], target_folder, tmp_path)), made(CASES["z-lab"], target_folder)
    table = served.runner.pool.new_table()
    row = Row(table, [*[0] * 6, *served.block(7)], 0, BLOCK - 1, [], features=served.rows[3:9])
    truth = head.forward(head.rows(hidden_states(NUM))[3:9], served.block(7))[0][1:]
    assert difference([served.runner.forward([row])], [truth]) < TOLERANCE


@pytest.mark.parametrize(
    ("keys", "last"),
    [
        ({"dflash_config": {**ZLAB["dflash_config"], "target_layer_ids": [1, LAYERS - 1]}}, NORMED),
        ({"dflash_config": {"mask_token_id": MASK}, "aux_hidden_state_layer_ids": [2, LAYERS]}, LAYERS),
    ],
)
def test_the_last_layer_is_read_on_the_side_of_the_norm_that_its_key_means(
    keys: dict[str, Any], last: int, target_folder: str, tmp_path: Path
) -> None:
    files = Checkpoint(BlockHead().write(tmp_path, {**ZLAB, **keys}))
    read = read_dflash(files, TargetFiles(target_folder), is_dspark=False)
    assert read.projection.spec.taps == (2, last)


def test_names_of_an_encoder_are_known(target_folder: str, tmp_path: Path) -> None:
    head = made(CASES["z-lab"], target_folder)
    fc, norm = head.tensors["fc.weight"], head.tensors["hidden_norm.weight"]
    head.leaves_out = (*head.leaves_out, "fc.weight", "hidden_norm.weight")
    folder = head.write(tmp_path, ZLAB, **{"encoder.fc.weight": fc, "encoder.output_norm_enc.weight": norm})
    files = read_dflash(Checkpoint(folder), TargetFiles(target_folder), is_dspark=False)
    assert difference(Served(files).rounds(), expected(head)) < TOLERANCE
