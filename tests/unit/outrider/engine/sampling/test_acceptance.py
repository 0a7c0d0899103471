"""Named outcomes of the acceptance rules: who is kept, what comes next, and that padding is never looked at."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.sampling.acceptance import ChainDecisions, Noise, accept_block, accept_block_one
from outrider.engine.sampling.coupled import coupled_index, device_keys
from outrider.engine.sampling.token_distribution import Ids, TokenDistribution, Weights
from outrider.wire.requests.params import SamplingParams
from tests.proposals import accept_token, accept_token_one
from tests.unit.outrider.engine.sampling.drawing import draw

INF = math.inf


def pairs(outcome: ChainDecisions) -> list[tuple[int, int]]:
    return list(zip(outcome.num_accepted.tolist(), outcome.next_ids.tolist(), strict=True))


def random_batch(num_rows: int, k: int, vocab_size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator).clamp_min(2.0**-54)

    logits = 2 * torch.randn(num_rows, k + 1, vocab_size, generator=generator)
    off = 0.5 * torch.randn(num_rows, k, vocab_size, generator=generator)
    target, draft = logits.log_softmax(-1), (logits[:, :k] + off).log_softmax(-1)
    ids = draw(draft.view(-1, vocab_size), noise(num_rows * k)).view(num_rows, k)
    return {
        "target_log_probs": target,
        "draft_log_probs": draft,
        "draft_ids": ids,
        "num_drafted": torch.randint(0, k + 1, (num_rows,), generator=generator),
        "accept_u": noise(num_rows, k),
        "keys": device_keys([SamplingParams(seed=b) for b in range(num_rows)], range(num_rows), torch.device("cpu")),
    }


def test_a_row_does_not_depend_on_its_batch() -> None:
    batch = random_batch(32, 4, 300, seed=0)
    together = pairs(accept_token(**batch))
    assert len({n for n, _ in together}) > 2
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    shuffled = pairs(accept_token(**{name: value[order] for name, value in batch.items()}))
    assert shuffled == [together[i] for i in order.tolist()]
    for b in range(32):
        k = int(batch["num_drafted"][b])
        widths = {"target_log_probs": k + 1, "keys": 4}
        alone = {
            name: value[b : b + 1] if name == "num_drafted" else value[b : b + 1, : widths.get(name, k)]
            for name, value in batch.items()
        }
        assert pairs(accept_token(**alone)) == [together[b]]


@pytest.mark.parametrize(
    ("one", "batched"),
    [
        (accept_token_one, accept_token),
        (accept_block_one, accept_block),
        (partial(accept_token_one, lenience=0.9), partial(accept_token, lenience=0.9)),
    ],
    ids=["by token", "by block", "lenient"],
)
def test_host_and_device_recover_and_add_the_same_ids(one: Callable[..., tuple[int, int]], batched: Any) -> None:
    """Of the same numbers of the position: what the host reads of it, and what is made on a device."""
    batch, seen = random_batch(64, 3, 40, seed=4), set[str]()
    for b, (num_accepted, next_id) in enumerate(pairs(batched(**batch))):
        num = int(batch["num_drafted"][b])
        targets, drafts = (
            [TokenDistribution(40, row.numpy()) for row in batch[f"{name}_log_probs"][b]]
            for name in ("target", "draft")
        )

        def own(place: int, weights: Weights, ids: Ids | None, b: int = b) -> int:
            return coupled_index(weights, ids, SamplingParams(seed=b), b + place)

        noise = Noise(batch["accept_u"][b].numpy(), own)
        drafted = batch["draft_ids"][b, :num].tolist()
        assert one(targets.__getitem__, drafts[:num], drafted, noise) == (num_accepted, next_id)
        seen.add("recovered" if num_accepted < num else "bonus" if num else "plain")
    assert seen == {"recovered", "bonus", "plain"}


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF, 0.0])
def test_padding_may_hold_anything(garbage: float) -> None:
    batch = random_batch(16, 4, 50, seed=2)
    expected = pairs(accept_token(**batch))
    for b, n in enumerate(batch["num_drafted"].tolist()):
        batch["target_log_probs"][b, n + 1 :] = garbage
        batch["draft_log_probs"][b, n:] = garbage
        batch["draft_ids"][b, n:] = 0
        batch["accept_u"][b, n:] = garbage
    assert pairs(accept_token(**batch)) == expected
