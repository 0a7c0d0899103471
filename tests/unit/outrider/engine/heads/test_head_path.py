"""A head on its cache: what the cache would change is refused, and so are rows that are none of the head's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.attention.paged_plan import PagedPlan
from outrider.engine.heads.head_loader import load_head
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.kinds import DFLASH, EAGLE3, HeadKind
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig
from tests.unit.outrider.engine.heads import test_dflash, test_eagle3
from tests.unit.outrider.engine.heads.block_layouts import BlockHead
from tests.unit.outrider.engine.heads.layouts import WIDTH, Eagle3

HEADS: tuple[tuple[HeadKind, Eagle3 | BlockHead, dict[str, Any]], ...] = (
    (EAGLE3, Eagle3(), test_eagle3.ORIGINAL),
    (DFLASH, BlockHead(), test_dflash.ZLAB),
)


@pytest.mark.parametrize(("kind", "head", "config"), HEADS)
def test_a_head_that_the_cache_would_change_is_refused(
    kind: HeadKind,
    head: Any,
    config: dict[str, Any],
    target_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The self-test must see through the columns without a row, whose logit hides every difference."""
    outputs = HeadPath.outputs

    def misplaced(self: HeadPath, plan: PagedPlan, **more: Any) -> Any:
        return outputs(self, replace(plan, position_ids=plan.position_ids // 2), **more)

    monkeypatch.setattr(HeadPath, "outputs", misplaced)
    settings = DraftConfig(
        model=head.write(tmp_path, config), device="cpu", max_slots=2, kv_cache_tokens=256, attention_path="paged"
    )
    with pytest.raises(ConfigError, match=r"cannot be served: paged: computes other logits with this cache"):
        load_head(settings, target_folder, kind)


def test_rows_without_features_of_the_heads_width_are_refused(target_folder: str, tmp_path: Path) -> None:
    served = test_eagle3.Served(test_eagle3.read(test_eagle3.CASES["original, pickled"], target_folder, tmp_path))
    table = served.runner.pool.new_table()
    for features in (None, torch.zeros(1, WIDTH), torch.zeros(2, WIDTH + 1)):
        with pytest.raises(AssertionError, match="features of"):
            served.runner.forward([Row(table, [3, 4], 0, 1, [3, 4], features=features)])
    assert table.num_tokens == 0
