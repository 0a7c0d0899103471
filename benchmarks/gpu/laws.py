"""Section `laws`: what the acceptance rules make on a device, counted, beside the target's law; and coupled bits.

Sequences of two tokens are decoded by rounds of two drafts from logits that depend on the place alone, as the workers
do it, on the device: laws by `distributions`, drafts by `inverse_cdf`, the rules of `acceptance`, and where a round
kept nothing the second token by `picked`. Their pairs of tokens must have the law that softmax gives on the host. The
tests of the whole system are in tests/law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from outrider.engine.sampling.acceptance import ChainDecisions, accept_block
from outrider.engine.sampling.coupled import device_keys, pick
from outrider.engine.sampling.device_sampling import distributions, inverse_cdf
from outrider.engine.sampling.noise import NoiseStream, host_uniforms
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.wire.requests.params import SamplingParams
from tests.proposals import accept_token

VOCAB_SIZE = 10
NUM_DRAFTS = 2
TEMPERATURE = 0.8
FIRST_POSITION = 7
"""Where the sequences begin."""
NUM_SEQUENCES = 100_000
"""Draws of each rule."""
P_WRONG = 1e-4
"""A right law gives a smaller p-value once in 10,000 tries; a wrong one that is worth a word gives 0."""
NEAR_TIES = 5e-5
"""Share of draws that may be others than on the host: two tokens as likely up to the rounding of a softmax."""
VOCABULARIES = (999, 128_256)
"""Ids of which the coupled numbers are compared, bit by bit."""


def run(bench: Bench) -> None:
    num = bench.size(NUM_SEQUENCES, 4000)
    device = torch.device(bench.device)
    num_wrong = 0
    for name, fitted in laws(device, num):
        is_right = fitted["p_value"] >= P_WRONG
        num_wrong += not is_right
        bench.tell("law", rule=name, **fitted, verdict="the target's law" if is_right else "WRONG")
        if not is_right:
            bench.find(f"not the target's law: {name}, p = {fitted['p_value']:.1e}")
    num_same = same_draws(device, num)
    bench.tell("draws", same_as_on_the_host=num_same, of=num)
    if num - num_same > NEAR_TIES * num:
        bench.find(f"{num - num_same} of {num} draws are others than on the host")
    _coupled_bits(bench)
    bench.sum_up(f"{num} draws of each rule; {num_wrong} laws are wrong; {num_same} draws are the host's")


def laws(device: torch.device, num: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each rule's name and the fit of its output."""
    target, draft = made_up_logits()
    expected = expected_law(target)
    sampled = Sampled(target.to(device), draft.to(device), num)
    yield "rejection, by token", fit(sampled.by_rounds(accept_token), expected)
    yield "rejection, by block", fit(sampled.by_rounds(accept_block), expected)
    yield "the target's own draws", fit(sampled.own(), expected)


def same_draws(device: torch.device, num: int) -> int:
    """Return how many of the target's own draws are the same on the device and on the host."""
    target, draft = made_up_logits()
    on_device = Sampled(target.to(device), draft.to(device), num).own()
    on_host = Sampled(target, draft, num).own()
    return int((on_device.cpu() == on_host).all(dim=1).sum())


def _coupled_bits(bench: Bench) -> None:
    """Compare the coupled numbers on the device with the host's, to the last bit."""
    from tests.coupled_bits import check_ids, check_logarithm, check_noise

    checks: list[tuple[str, Callable[[], None]]] = [("logarithm", lambda: check_logarithm(bench.device))]
    for size in bench.size(VOCABULARIES, VOCABULARIES[:1]):
        checks.append((f"noise of {size} ids", partial(check_noise, bench.device, size)))
        checks.append((f"ids of {size}", partial(check_ids, bench.device, size)))
    for name, check in checks:
        outcome = "the same bits"
        try:
            check()
        except AssertionError:
            outcome = "OTHER BITS"
            bench.find(f"coupled: {name} has other bits than on the host")
        bench.tell("coupled", what=name, outcome=outcome)


def made_up_logits() -> tuple[Tensor, Tensor]:
    """Return those of a target [K + 1, V] and of a draft [K, V] float32 that is about right."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(NUM_DRAFTS + 1, VOCAB_SIZE, generator=generator) * 0.7
    draft = target[:NUM_DRAFTS] + torch.randn(NUM_DRAFTS, VOCAB_SIZE, generator=generator) * 0.7
    return target, draft


def expected_law(target: Tensor) -> Tensor:
    """Return the probability [V, V] float64 of each pair of tokens; target [K + 1, V]: logits on the host."""
    first, second = (target.double() / TEMPERATURE).softmax(dim=1)[:NUM_DRAFTS]
    return first[:, None] * second


class Sampled:
    """Draws many sequences at once, each with a seed of its own."""

    def __init__(self, target: Tensor, draft: Tensor, num: int) -> None:
        """target: logits [K + 1, V]; draft: [K, V], both on the device that is to draw."""
        self._device = target.device
        self._params = [SamplingParams(temperature=TEMPERATURE, seed=seed) for seed in range(num)]
        row = LogitRow(SamplingState(self._params[0], (), ()))
        self._target = distributions(target.clone(), [row] * len(target)).expand(num, -1, -1)  # [N, K + 1, V]
        self._draft = distributions(draft.clone(), [row] * len(draft)).expand(num, -1, -1)  # [N, K, V]

    def own(self) -> Tensor:
        """Return what the target draws without drafts, [N, 2] int64."""
        return torch.stack([pick(self._target[:, place], self._keys(place)) for place in range(NUM_DRAFTS)], dim=1)

    def by_rounds(self, accept: Any) -> Tensor:
        """Return the first two tokens [N, 2] int64 of a round under a rule and, where it made one, a plain step."""
        drafts, num = self._drafts(), len(self._params)
        num_drafted = torch.full((num,), NUM_DRAFTS, device=self._device)
        accept_u = self._uniforms(NoiseStream.ACCEPT)
        found: ChainDecisions = accept(self._target, self._draft, drafts, num_drafted, accept_u, self._keys(0))
        after = pick(self._target[:, 1], self._keys(1))
        first = torch.where(found.num_accepted > 0, drafts[:, 0], found.next_ids)
        second = torch.where(found.num_accepted > 1, drafts[:, 1], found.next_ids)
        return torch.stack([first, torch.where(found.num_accepted > 0, second, after)], dim=1)

    def _drafts(self) -> Tensor:
        u = self._uniforms(NoiseStream.DRAFT)
        each = [inverse_cdf(self._draft[:, place].double().exp(), u[:, place])[0] for place in range(NUM_DRAFTS)]
        return torch.stack(each, dim=1)

    def _keys(self, place: int) -> Tensor:
        return device_keys(self._params, [FIRST_POSITION + place] * len(self._params), self._device)

    def _uniforms(self, purpose: NoiseStream) -> Tensor:
        """Return [N, K] float64, as a round at FIRST_POSITION has them."""
        num = len(self._params)
        seeds = np.arange(num, dtype=np.uint64).repeat(NUM_DRAFTS)
        places = np.tile(np.arange(FIRST_POSITION, FIRST_POSITION + NUM_DRAFTS, dtype=np.uint64), num)
        made = host_uniforms(seeds, np.zeros_like(seeds), places, purpose, FIRST_POSITION)
        return torch.from_numpy(made).view(num, NUM_DRAFTS).to(self._device)


def fit(pairs: Tensor, expected: Tensor) -> dict[str, Any]:
    """Return Pearson's chi-square of pairs [N, 2] int64 against their law [V, V], and its p-value."""
    counts = torch.bincount((pairs[:, 0] * VOCAB_SIZE + pairs[:, 1]).cpu(), minlength=VOCAB_SIZE**2).double()
    wanted = expected.flatten() * len(pairs)
    statistic, degrees = float(((counts - wanted) ** 2 / wanted).sum()), VOCAB_SIZE**2 - 1
    return {
        "num_sequences": len(pairs),
        "statistic": statistic,
        "degrees": degrees,
        "p_value": chi_square_tail(statistic, degrees),
    }


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square variable of so many degrees of freedom is at least this large."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
