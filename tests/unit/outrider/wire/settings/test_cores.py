"""CPU cores: what the setting says, and who gets which."""

from __future__ import annotations

import pytest

from outrider.wire.settings.cores import shares


@pytest.mark.parametrize(
    ("num_cores", "num_targets", "num_drafts", "shared"),
    [
        (2, 1, 1, (1, 1)),
        (3, 1, 1, (2, 1)),
        (4, 1, 1, (3, 1)),
        (8, 1, 1, (6, 2)),
        (8, 2, 2, (3, 1)),
        (16, 2, 4, (6, 1)),
        (5, 2, 2, (1, 1)),
        (2, 2, 2, (0.5, 0.5)),
        (2, 1, 2, (0.66, 0.66)),
        (4, 2, 0, (2, 0)),
        (1, 1, 1, (0.5, 0.5)),
    ],
)
def test_targets_have_most_cores_and_workers_share_one_where_there_are_too_few(
    num_cores: int, num_targets: int, num_drafts: int, shared: tuple[float, float]
) -> None:
    assert shares(num_cores, num_targets, num_drafts) == shared
    assert num_targets * shared[0] + num_drafts * shared[1] <= num_cores
