"""What a step's logits decide in each slot: the host's way, a device's way, and the rules in words, all equal.

The device's code runs here on the CPU: it is the same tensors' operations, and a host may wait for them once.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine import memory
from outrider.engine.sampling import coupled, device_sampling, threads
from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.device_sampling import distributions
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import NoiseStream, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState, process_unchecked
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal
from target_service.step.decide import decide
from target_service.step.decide_on_device import decide_on_device
from target_service.step.step_rows import Decided
from tests import block_rule
from tests.grammars import ONE, REGEX, compiled, grammars_of
from tests.live_bytes import LiveBytes
from tests.proposals import PlainSlot, by_token, chain_proposal, sure
from tests.unit.outrider.engine.cuda.fake_cuda import fake_cuda

VOCAB = 40
GRAMMARS = grammars_of(width=VOCAB)
PROMPT = [3, 1, 4, 1, 5]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 1.5, "bad_words": ((7,), (1, 2))},
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_p": 0.9, "frequency_penalty": 0.8, "grammar": REGEX},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 3},
    {"temperature": 0.0, "lenience": 0.2},
    {"lenience": 0.5},
    {"temperature": 0.7, "top_p": 0.9, "lenience": 0.8},
    {"acceptance": AcceptanceRule.COUPLED},
    {"acceptance": AcceptanceRule.COUPLED, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
)


def waiting_once(logits: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    """What `compute` makes of logits on a device; the host waits for that once."""
    with fake_cuda() as device:
        on_device = logits.to("cuda")
        device.take()
        found = compute(on_device)
        waits = device.take().waits
    assert len(waits) == 1, waits
    return found


@dataclass
class Step:
    """Some slots in one forward."""

    ready: list[Proposal]
    states: list[SamplingState]
    logits: Tensor
    """[sum(K_b + 1), V]"""

    def subset(self, slots: list[int]) -> "Step":
        parts = self.logits.split([len(r.tree.ids) + 1 for r in self.ready])
        return Step(
            [self.ready[b] for b in slots], [self.states[b] for b in slots], torch.cat([parts[b] for b in slots])
        )


def make_step(kinds: list[int], counts: list[int], seed: int, vocab_size: int = VOCAB) -> Step:
    """Drafts drawn from laws near the target's, as many as `counts` says in each slot."""
    generator = torch.Generator().manual_seed(seed)
    ready, states, logits = [], [], []
    for index, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        params = SamplingParams(max_tokens=100, seed=seed + index, **KINDS[kind])
        output = torch.randint(0, vocab_size, (index % 4,), generator=generator).tolist()
        output = [ONE] * len(output) if params.grammar else output
        grammar = compiled(params.grammar, GRAMMARS) if params.grammar else None
        state = SamplingState(params, PROMPT, (0,), grammar)
        state.set_output(output)
        own = 2 * torch.randn(count + 1, vocab_size, generator=generator)
        off = HostLogits(own + 0.7 * torch.randn(own.shape, generator=generator))
        ids, laws = list[int](), list[TokenDistribution]()
        for j in range(count):
            laws.append(off.distribution(j, LogitRow(state, tuple(ids))).normalised())
            u = float(torch.rand((), generator=generator).clamp_min(1e-9))
            guess = coupled_id(laws[-1], params, len(PROMPT) + len(output) + j) if is_coupled(params) else None
            ids.append(laws[-1].draw(u) if guess is None else guess)
            if index % 3 == 2:  # as it comes from who copies
                laws[-1] = TokenDistribution(vocab_size, np.zeros(1, dtype=np.float32), np.array(ids[-1:]))
        is_guessed = index % 3 == 2 and params.lenience == 1.0
        slot = PlainSlot(params, [*PROMPT, *output])
        ready.append(chain_proposal(slot, ids, None if params.is_deterministic or is_guessed else laws))
        states.append(state)
        logits.append(own)
    return Step(ready, states, torch.cat(logits))


def in_words(step: Step) -> list[Decided]:
    """Sun et al., Algorithm 2, over whole laws. Coupled, and where the drafts are guesses: whatever they are, the
    largest sum of log-prob and Gumbel number. Greedy: the best token.
    """
    outcomes, start = [], 0
    for r, state in zip(step.ready, step.states, strict=True):
        rows = [LogitRow(state, tuple(r.tree.ids[:j])) for j in range(len(r.tree.ids) + 1)]
        processed = process_unchecked(step.logits[start : start + len(rows)], rows)
        laws = distributions(processed, rows).double().exp().numpy()
        if r.slot.params.greedy:
            outcomes.append(nearly_best_in_words(r, processed.double().numpy()))
        else:
            outcomes.append(one_in_words(r, laws / laws.sum(axis=1, keepdims=True)))
        start += len(rows)
    return outcomes


def one_in_words(r: Proposal, laws: np.ndarray) -> Decided:
    start = len(r.slot.committed)

    def u(j: int) -> float:
        return float(host_slot_uniforms([r.slot.params], [start], [start + j], [NoiseStream.ACCEPT])[0, 0])

    def own(j: int, weights: np.ndarray) -> int:
        return block_rule.gumbel_max(weights, r.slot.params, start + j)

    if not r.draws:
        said = [own(j, law) for j, law in enumerate(laws)]
        kept = [a == b for a, b in zip(said, r.tree.ids, strict=False)]
        return accepted(n := [*kept, False].index(False), said[n])
    drafts = [np.exp(law_of(r, j).dense_scores(), dtype=float) for j in range(len(r.draws))]
    if r.slot.params.lenience < 1.0:
        return lenient_in_words(r, laws, drafts, u, own)
    return accepted(*block_rule.verdict(laws, [draft / draft.sum() for draft in drafts], r.tree.ids, u, own))


def lenient_in_words(
    r: Proposal,
    laws: np.ndarray,
    drafts: list[np.ndarray],
    u: Callable[[int], float],
    own: Callable[[int, np.ndarray], int],
) -> Decided:
    """Leviathan et al., A.5: a draft's probability counts as `lenience` of it."""
    share, num = r.slot.params.lenience, len(r.tree.ids)
    for j, token_id in enumerate(r.tree.ids):
        draft = share * drafts[j] / drafts[j].sum()
        if u(j) >= laws[j][token_id] / draft[token_id]:
            return accepted(j, own(j, np.maximum(laws[j] - draft, 0.0)))
    return accepted(num, own(num, laws[num]))


def nearly_best_in_words(r: Proposal, processed: np.ndarray) -> Decided:
    """At temperature 0: the best token is kept, and with lenience a draft of that share of its probability."""
    lenience = r.slot.params.lenience
    for j, token_id in enumerate(r.tree.ids):
        best = int(processed[j].argmax())
        near = lenience < 1.0 and processed[j][token_id] >= processed[j][best] + math.log(lenience)
        if token_id != best and not near:
            return accepted(j, best)
    return accepted(len(r.tree.ids), int(processed[-1].argmax()))


def accepted(num: int, next_id: int) -> Decided:
    return Decided(tuple(range(num)), next_id)


def law_of(r: Proposal, node: int) -> TokenDistribution:
    law = r.draws[node].distribution
    assert law is not None
    return law


def is_coupled(params: SamplingParams) -> bool:
    return params.is_deterministic and not params.greedy


STEPS = st.builds(
    lambda slots, seed: make_step([kind for kind, _ in slots], [count for _, count in slots], seed),
    st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 4)), min_size=1, max_size=6),
    st.integers(0, 10_000),
)


class TestDecide:
    @given(step=STEPS)
    @settings(max_examples=60)
    def test_host_and_device_follow_the_rules(self, step: Step) -> None:
        wanted = in_words(step)
        assert decide(step.ready, step.states, step.logits) == wanted
        on_device = waiting_once(step.logits, lambda logits: decide_on_device(step.ready, step.states, logits))
        assert on_device == wanted

    def test_padding_beside_a_wider_slot_is_no_draft(self) -> None:
        """Token 0 pads, and lenience lets many tokens pass."""
        for seed in range(40):
            step = make_step([0, 7, 7], [3, 0, 1], seed)
            assert decide_on_device(step.ready, step.states, step.logits) == in_words(step)

    @given(step=STEPS, data=st.data())
    @settings(max_examples=15)
    def test_a_slot_does_not_depend_on_the_others(self, step: Step, data: st.DataObject) -> None:
        together = decide(step.ready, step.states, step.logits)
        order = data.draw(st.permutations(range(len(step.ready))))
        some = step.subset(order[: data.draw(st.integers(1, len(order)))])
        assert decide(some.ready, some.states, some.logits) == [together[b] for b in order[: len(some.ready)]]

    def test_what_is_reported_comes_with_the_decisions(self) -> None:
        """Of accepted tokens and the next one, under the raw logits; each slot as many as it asks for."""
        step = make_step([0, 2, 1, 4, 5], [3, 4, 2, 0, 2], seed=7)
        for r, num_logprobs in zip(step.ready, (2, None, 5, 0, 3), strict=True):
            r.slot.params = dataclasses.replace(r.slot.params, num_logprobs=num_logprobs)
        on_host = sure(decide(step.ready, step.states, step.logits))
        on_device = waiting_once(step.logits, lambda logits: sure(decide_on_device(step.ready, step.states, logits)))
        assert sum(len(own.path) > 0 for own in on_host) >= 2
        start = 0
        for r, mine, other in zip(step.ready, on_host, on_device, strict=True):
            laws = step.logits[start : start + len(mine.path) + 1].double().log_softmax(dim=1)
            token_ids, most = [*r.tree.ids[: len(mine.path)], mine.next_id], r.slot.params.num_logprobs
            start += len(r.tree.ids) + 1
            if most is None:
                assert not mine.reported and not other.reported
                continue
            for found in (mine.reported, other.reported):
                for law, token_id, (own, ids, values) in zip(laws, token_ids, found, strict=True):
                    assert own == pytest.approx(float(law[token_id]), abs=1e-5)
                    assert list(ids) == law.argsort(descending=True)[:most].tolist()
                    assert values == pytest.approx(law[list(ids)].tolist(), abs=1e-5)

    def test_threads_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = make_step([0, 2, 4, 5, 6, 3], [3, 4, 0, 2, 4, 1], seed=5)
        wanted, before = decide(step.ready, step.states, step.logits), threading.active_count()
        torch.set_num_threads(2)
        seen: set[str] = set()
        monkeypatch.setattr(threads, "WORTH_THREADS", 1)
        monkeypatch.setattr(HostLogits, "distribution", told(HostLogits.distribution, seen))
        assert decide(step.ready, step.states, step.logits) == wanted
        assert seen and threading.current_thread().name not in seen
        step.logits[0] = step.logits[5] = math.nan
        assert undecided(decide(step.ready, step.states, step.logits)) == {0, 1}
        assert threading.active_count() == before

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_logits_that_are_no_numbers(self, value: float) -> None:
        step = make_step([0, 2, 4, 2], [0, 3, 2, 0], seed=1)
        step.logits[1, 9] = step.logits[5, 3] = value  # the first rows of slots 1 and 2
        assert undecided(decide(step.ready, step.states, step.logits)) == {1, 2}
        assert undecided(decide_on_device(step.ready, step.states, step.logits)) == {1, 2}

    @pytest.mark.parametrize("kind", [0, 2, len(KINDS) - 2], ids=["greedy", "by token", "coupled"])
    def test_rows_past_a_rejection_are_not_looked_at_on_the_host(self, kind: int) -> None:
        step = make_step([kind], [4], seed=3)
        with by_token():
            wanted = sure(decide(step.ready, step.states, step.logits))
            assert len(wanted[0].path) < 4
            step.logits[len(wanted[0].path) + 1 :] = math.nan
            assert decide(step.ready, step.states, step.logits) == wanted


def told(method: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    """The method, noting the thread it runs on."""

    def noted(*args: Any) -> Any:
        names.add(threading.current_thread().name)
        return method(*args)

    return noted


def undecided(decisions: Sequence[Decided | NonFiniteLogits]) -> set[int]:
    """Which slots could not be decided."""
    return {index for index, decision in enumerate(decisions) if isinstance(decision, NonFiniteLogits)}


@pytest.mark.parametrize(("kind", "share"), [(2, 0.75), (7, 0.85), (11, 0.5)])
def test_what_a_decision_holds_on_a_device_is_counted(kind: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory budget's bytes are enough for each rule, and for the fullest not much too many."""
    vocab_size, num_slots = 16384, 2
    for module in (coupled, memory, device_sampling):
        monkeypatch.setattr(module, "MAX_NUMBERS", num_slots * vocab_size)
    step = make_step([kind] * num_slots, [5] * num_slots, seed=kind, vocab_size=vocab_size)
    with torch.inference_mode(), LiveBytes(step.logits) as live:
        decide_on_device(step.ready, step.states, step.logits)
    counted = memory.decision_bytes(step.logits.numel())
    assert share * counted <= live.peak <= counted, live.peak / step.logits.nbytes
