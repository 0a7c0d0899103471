"""Proposals, and the slots that they are of, as tests write them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.sampling import acceptance
from outrider.engine.sampling.acceptance import ChainDecisions, DrawTable, Noise, accept_draws
from outrider.engine.sampling.penalties import NonFiniteLogits
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Draw, Proposal
from target_service.step import decide as host_rules
from target_service.step import decide_on_device as device_rules
from target_service.step.decide import accept_by_draws
from target_service.step.step_rows import Decided


@dataclass
class PlainSlot:
    """All that a decision reads of a slot."""

    params: SamplingParams
    committed: list[int]
    key: tuple[int, int] = (1, 0)


def chain_proposal(slot: Any, ids: Sequence[int], laws: Sequence[TokenDistribution] | None = None) -> Proposal:
    """Return a chain; laws: what each token was drawn from, None where they are matched."""
    draws = [Draw(node, law) for node, law in enumerate(laws or ())]
    return Proposal(slot, DraftTree.of(ids, range(-1, len(ids) - 1)), draws)


def tree_draws(drawn: Mapping[int, Sequence[tuple[TokenDistribution, Sequence[int]]]]) -> list[Draw]:
    """Return draws of what was drawn after each node: by drafter a law, and the nodes that were drawn from it."""
    draws = list[Draw]()
    for drafters in drawn.values():
        for law, nodes in drafters:
            draws += [Draw(node, law if place == 0 else None) for place, node in enumerate(nodes)]
    return draws


def accept_token_one(
    target_law: Callable[[int], TokenDistribution],
    draft_laws: Sequence[TokenDistribution],
    draft_ids: Sequence[int],
    noise: Noise,
    lenience: float = 1.0,
) -> tuple[int, int]:
    """Decide a chain by token on the host; return (num_accepted, next id). Arguments as of `accept_block_one`."""
    proposal = chain_proposal(PlainSlot(SamplingParams(), []), draft_ids, draft_laws)
    noise = Noise(noise.accept[: len(draft_ids)], noise.own)
    decided = accept_by_draws(proposal, lambda node: target_law(node + 1), noise, lenience)
    return len(decided.path), decided.next_id


def accept_token(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    draft_ids: Tensor,
    num_drafted: Tensor,
    accept_u: Tensor,
    keys: Tensor,
    lenience: float = 1.0,
) -> ChainDecisions:
    """Decide chains by token as a device does: after every row at once. Arguments as of `accept_block`."""
    num_slots, num_rows, vocab_size = target_log_probs.shape
    width = num_rows - 1
    if not width:
        draft_ids, accept_u = (torch.zeros(num_slots, 1, dtype=dtype) for dtype in (torch.int64, torch.float64))
    is_drafted = torch.arange(num_rows, device=num_drafted.device) < num_drafted[:, None]  # [B, K + 1]
    at = torch.arange(num_rows, device=num_drafted.device).clamp_max(max(0, width - 1))
    host_laws = draft_log_probs.cpu().numpy()
    laws = [
        (slot * num_rows + j, TokenDistribution(vocab_size, host_laws[slot, j]))
        for slot, num in enumerate(num_drafted.tolist())
        for j in range(num)
    ]
    table = DrawTable(
        draft_ids[:, at].reshape(-1, 1).cpu().numpy(),
        accept_u[:, at].reshape(-1, 1).cpu().numpy(),
        is_drafted.flatten().long().cpu().numpy(),
        [laws],
        np.full(num_slots * num_rows, lenience),
    )
    positions = keys[:, None, 3] + torch.arange(num_rows, device=keys.device)
    row_keys = torch.cat((keys[:, None, :3].expand(-1, num_rows, -1), positions[..., None]), dim=2)
    accepted_ids, left = accept_draws(table, acceptance.probabilities(target_log_probs.flatten(0, 1)))
    own = acceptance.pick(left.log(), row_keys.flatten(0, 1)).view(num_slots, num_rows)
    num_accepted = (accepted_ids.view(num_slots, num_rows) >= 0).long().cumprod(dim=1).sum(dim=1)
    next_ids = own.gather(1, num_accepted[:, None])[:, 0]
    return ChainDecisions(num_accepted, next_ids)


@contextmanager
def by_token() -> Iterator[None]:
    """Decide chains by token, as under lenience."""
    with pytest.MonkeyPatch.context() as patch:
        for rules in (host_rules, device_rules):
            patch.setattr(rules, "is_block", lambda proposal: False)
        yield


def sure(decisions: Sequence[Decided | NonFiniteLogits]) -> list[Decided]:
    """Return the decisions of slots all of which could be decided."""
    found = list[Decided]()
    for decision in decisions:
        assert isinstance(decision, Decided), decision
        found.append(decision)
    return found
