"""A step waits for the device once: when its tokens come back. Counted on CPU, over real workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.engine.sampling.host_sampling import HostLogits
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.params import SamplingParams
from outrider.wire.speculation import Speculation
from tests.engine.cuda_pair import Pair, tiny_pair
from tests.engine.cuda_sync_counter import SyncCounter, install

PROMPTS = [[12, 7, 99, 4, 31], [5, 6, 7], [200, 3, 9, 9, 21, 44]]
PLAIN: dict[str, Any] = {"temperature": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": PLAIN,
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {7: 2.0}},
    "logprobs": {"temperature": 0.0, "num_logprobs": 3},
    "bans": {**PLAIN, "bad_words": ((7, 8), (9,)), "min_tokens": 4, "ignore_eos": False},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return tiny_pair(tmp_path_factory.mktemp("sync"))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> SyncCounter:
    counter = SyncCounter()
    install(monkeypatch, counter)
    return counter


def test_the_counter_sees_what_a_gpu_would_wait_for(counter: SyncCounter) -> None:
    host = torch.arange(4.0)
    with counter.step():
        device = torch.arange(4.0)
        counter.move(device)
        assert float(host[host > 1].sum()) == 5.0 and host.tolist()
        shifted = device.view(2, 2).transpose(0, 1) + host[:2]
        assert counter.waits == []
        for wait in (
            lambda: shifted.tolist(),
            lambda: bool((shifted > 1).any()),
            lambda: shifted[shifted > 1],
            lambda: shifted.nonzero(),
            lambda: float(shifted[0, 0]),
            lambda: shifted.cpu(),
            lambda: shifted.cpu().numpy(),
        ):
            before = len(counter.waits)
            wait()
            assert len(counter.waits) == before + 1, counter.waits
        copy = shifted.cpu()
        counted = len(counter.waits)
        assert copy.tolist() and len(counter.waits) == counted


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        *((name, DraftLogprobs.FULL) for name in CASES),
        *((name, DraftLogprobs.TOPK) for name, values in CASES.items() if values["temperature"]),
    ],
)
def test_one_wait_a_step(
    models: tuple[str, str], counter: SyncCounter, monkeypatch: pytest.MonkeyPatch, name: str, encoding: DraftLogprobs
) -> None:
    pair = Pair(monkeypatch, *models, device="cpu", max_slots=4)
    monkeypatch.setattr(HostLogits, "reads", staticmethod(lambda logits: False))  # on CPU the host would read them
    committed = opened(pair, CASES[name], encoding)
    advance(pair, committed)  # lazily made tables and such
    waits_once_a_step(pair, committed, counter, monkeypatch)


def waits_once_a_step(
    pair: Pair,
    committed: dict[int, list[int]],
    counter: SyncCounter,
    monkeypatch: pytest.MonkeyPatch,
) -> list[list[str]]:
    """-> the waits of each step of a round, one in each."""
    for worker in (pair.draft, pair.target):
        worker.around_step = counter.step
    steps = count_steps(monkeypatch, pair, counter)
    advance(pair, committed)
    assert all(len(waits) == 1 for waits in steps), steps
    assert counter.forward_waits == []
    return steps


def opened(pair: Pair, case: dict[str, Any], encoding: DraftLogprobs) -> dict[int, list[int]]:
    params = SamplingParams(**{"max_tokens": 32, "seed": 3, "ignore_eos": True, **case})
    committed: dict[int, list[int]] = {}
    for slot, prompt in enumerate(PROMPTS, start=1):
        pair.open(slot, prompt, params, Speculation(3, 3, draft_logprobs=encoding, draft_topk=8))
        committed[slot] = list(prompt)
    return committed


def advance(pair: Pair, committed: dict[int, list[int]]) -> None:
    for ids, verdict in zip(committed.values(), pair.round(committed), strict=True):
        ids.extend(verdict.token_ids)


def count_steps(monkeypatch: pytest.MonkeyPatch, pair: Pair, counter: SyncCounter) -> list[list[str]]:
    """-> the waits of each step to come."""
    steps: list[list[str]] = []
    for worker in (pair.draft, pair.target):
        own = worker.step

        def step(own: Any = own) -> bool:
            worked = own()
            if worked:
                steps.append(list(counter.waits))
            counter.waits.clear()
            return bool(worked)

        monkeypatch.setattr(worker, "step", step)
    return steps
