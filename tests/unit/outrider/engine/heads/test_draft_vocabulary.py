"""The target's id of each row of an lm_head: from offsets, from a mask, or as they are."""

from pathlib import Path

import pytest
import torch

from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.draft_vocabulary import target_ids
from outrider.wire.errors import ConfigError

OFFSETS = [0, 0, 3]
MASK = [True, True, False, False, False, True]


@pytest.fixture
def files(tmp_path: Path) -> Checkpoint:
    (tmp_path / "config.json").write_text("{}")
    return Checkpoint(str(tmp_path))


def ids_of(
    files: Checkpoint, d2t: list[int] | None, t2d: list[bool] | None, num_rows: int = 3, vocab_size: int = 6
) -> list[int]:
    offsets = None if d2t is None else torch.tensor(d2t, dtype=torch.int32)
    mask = None if t2d is None else torch.tensor(t2d)
    return target_ids(files, offsets, mask, num_rows, vocab_size).tolist()


def test_offsets_and_mask_give_the_same_ids(files: Checkpoint) -> None:
    assert ids_of(files, OFFSETS, None) == ids_of(files, None, MASK) == ids_of(files, OFFSETS, MASK) == [0, 1, 5]


def test_a_head_with_all_rows_needs_neither_and_padding_is_left_out(files: Checkpoint) -> None:
    assert ids_of(files, None, None, vocab_size=3) == [0, 1, 2]
    assert ids_of(files, [0] * 5, [True] * 4, vocab_size=3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("d2t", "t2d", "vocab_size", "message"),
    [
        (None, None, 6, "has 3 rows for a vocabulary of 6, and neither d2t nor t2d"),
        ([0, 0], None, 6, "^d2t of .* keeps 2 ids, and there are 3 rows"),
        ([0, 1, 5], None, 6, "^d2t of .* leads to the id 7, .* which end at 5"),  # ids, not offsets
        ([0, -1, 0], None, 6, "^d2t of .* leads to the id 0, an id twice"),
        ([-1, 0, 0], None, 6, "^d2t of .* leads to the id -1"),
        (OFFSETS, None, 5, "^d2t of .* leads to the id 5, .* which end at 4"),
        (OFFSETS, [True, True, True, False, False, False], 6, "has a t2d that disagrees with d2t"),
        ([0, 0, 1], None, 3, "leads to the id 3"),
        ([1, -1, 0], None, 3, "has a d2t that disagrees with its lm_head"),
    ],
)
def test_what_does_not_fit_is_named(
    files: Checkpoint, d2t: list[int] | None, t2d: list[bool] | None, vocab_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ids_of(files, d2t, t2d, vocab_size=vocab_size)
