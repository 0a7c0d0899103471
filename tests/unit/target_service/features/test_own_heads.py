"""Heads in the target itself: when their logits are computed, and how long they are kept, over scripted rows."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from target_service.features.own_heads import OwnHeads

WIDTH = 8


def best(own: OwnHeads, slot: Any) -> int:
    if slot.key not in own._logits:
        own._run_heads()
    return own._logits[slot.key].raw_best_id(0)


def test_heads_run_once_for_all_slots() -> None:
    rows = {1: torch.eye(WIDTH)[3], 2: torch.eye(WIDTH)[4]}
    fed: list[int] = []

    def heads(hidden: Tensor) -> Tensor:
        fed.append(len(hidden))
        return hidden[:, None]  # [S, 1, V], of one head that copies

    features: Any = SimpleNamespace(add_head=lambda *_: None, feature=lambda digest, key, position: rows[key])
    heads.facts = SimpleNamespace(num_heads=1)  # type: ignore[attr-defined]
    loaded: Any = SimpleNamespace(network=heads, projection=None)
    own = OwnHeads(loaded, features)
    job: Any = None
    slots: list[Any] = [SimpleNamespace(key=key, committed=[5, 6, 7]) for key in rows]
    for slot in slots:
        own.open(job, slot)
    assert [best(own, slot) for slot in slots] == [3, 4]
    assert best(own, slots[0]) == 3 and fed == [2], "what was computed is kept"
    own.commit(slots[0], 1)
    rows[1] = torch.eye(WIDTH)[2]
    assert best(own, slots[0]) == 2 and fed == [2, 1]
