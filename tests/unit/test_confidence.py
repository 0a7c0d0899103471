"""A draft that ends its proposals where it is no longer confident of them: the output keeps the target's law."""

from __future__ import annotations

import itertools
import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draft_service.active import Asked, Drawn
from draft_service.sender import Sender
from outrider.engine.row_law import RowLaw
from outrider.wire.params import SamplingParams
from tests.unit import test_chain
from tests.unit.test_acceptance_law import TOLERANCE, emitted_law, joint, random_law
from tests.unit.test_chain import VOCAB, Stopping, StoppingBlock

K = 3
STOP = torch.tensor([0.0] + [-math.inf] * (VOCAB - 1))


def confidence(draft: Any, ids: tuple[int, ...]) -> float:
    """Of all the ids: the product of their probabilities, each under the law after those before it."""
    return math.prod(float(draft(ids[:j]).exp()[ids[j]]) for j in range(len(ids)))


@pytest.mark.parametrize("rounds", (Stopping, StoppingBlock))
@pytest.mark.parametrize(("least", "early"), [(0.1, {2}), (0.4, {1, 2})])
def test_the_output_has_the_targets_law(
    least: float, early: set[int], rounds: type[Stopping], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By token and by block, at every length that the drafted tokens may bring about."""
    monkeypatch.setattr(test_chain, "K", K)
    draft = random_law(VOCAB, K, seed=5)

    def ends(prefix: tuple[int, ...]) -> bool:
        return any(confidence(draft, prefix[:j]) < least for j in range(1, len(prefix) + 1))

    lengths = {j for ids in itertools.product(range(VOCAB), repeat=K) for j in range(1, K) if ends(ids[:j])}
    assert lengths == early

    def law(prefix: tuple[int, ...]) -> RowLaw | None:
        return None if ends(prefix) else RowLaw(VOCAB, draft(prefix).float().numpy())

    def drawn(prefix: tuple[int, ...]) -> Tensor:
        return STOP if ends(prefix) else draft(prefix)

    work = type(rounds.__name__, (rounds,), {"law": staticmethod(law)})
    target = random_law(VOCAB, K, seed=1)
    emitted = emitted_law(target, drawn, VOCAB, K, rounds=work)
    assert float((emitted - joint(target, VOCAB, K + 1)).abs().max()) < TOLERANCE


class AtOnce:
    def answer(self, send: Any) -> None:
        send()


def proposal(min_confidence: float, *, determined: bool = False) -> Asked:
    job: Any = SimpleNamespace(
        num_draft_tokens=4, min_confidence=min_confidence, ticket=1, arrived_s=time.monotonic(), tree=None
    )
    params = SamplingParams(temperature=0.0 if determined else 1.0)
    slot: Any = SimpleNamespace(committed=[1, 2], params=params)
    return Asked(job, slot, "t:1", 9, None)


@pytest.mark.parametrize(
    ("min_confidence", "chances", "length"),
    [
        (0.0, (None, None, None, None), 4),
        (0.5, (0.9, 0.9, 0.9, 0.9), 4),
        (0.5, (0.9, 0.5), 2),
        (0.5, (0.1,), 1),
        (0.45, (0.9, 0.5, 0.5), 3),
    ],
)
@pytest.mark.parametrize("determined", [False, True])
def test_it_ends_with_the_token_that_makes_it_unlikely_and_the_target_is_told(
    min_confidence: float, chances: tuple[float | None, ...], length: int, determined: bool
) -> None:
    parts: list[Any] = []
    engine: Any = AtOnce()
    sender, a = Sender(engine, parts.append), proposal(min_confidence, determined=determined)
    law = None if determined else RowLaw(VOCAB, np.log(np.full(VOCAB, 0.25, dtype=np.float32)))
    for token_id, chance in enumerate(chances):
        assert not a.done
        a.take(Drawn(token_id, law, chance))
        sender.send_due(a)
    assert a.done and len(a.draft_ids) == a.num_announced == length
    assert [token_id for part in parts for token_id in part.draft_ids] == list(range(length))
    assert [part.num_draft_tokens for part in parts] == ([length] if determined else [4] * (length - 1) + [length])
