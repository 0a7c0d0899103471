"""Rounds of a draft that is a model and of its target on the fake CUDA device: every rule and every shape of a step."""

from collections.abc import Iterator

import pytest

from tests.unit.outrider.engine.cuda.cuda_cases import GREEDY, MODEL_CASES, NONE, Case, check, opened, rounds
from tests.unit.outrider.engine.cuda.cuda_pair import Pair, tiny_pair
from tests.unit.outrider.engine.cuda.fake_cuda import FakeCuda

SIZES = {"max_slots": 4, "context_limit": 256}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def on_cpu(models: tuple[str, str]) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        yield Pair(patch, *models, device="cpu", attention_path="paged", **SIZES)


@pytest.fixture(scope="module")
def pair(on_cpu: Pair, device: FakeCuda, models: tuple[str, str]) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        yield Pair(patch, *models, device="cuda", attention_path="paged", **SIZES)


@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: case.name)
def test_a_step_waits_once_and_decides_as_on_the_cpu(device: FakeCuda, pair: Pair, on_cpu: Pair, case: Case) -> None:
    with opened(pair, case), opened(on_cpu, case):
        steps = rounds(device, pair, case)
        check(case, steps)
        for _ in range(3):
            on_cpu.round()
        params = next(iter(pair.slots.values())).params
        if not params.is_deterministic and not case.speculation.is_fixed:
            return  # what is drawn depends on how many drafts were in time
        for slot, other in zip(pair.slots.values(), on_cpu.slots.values(), strict=True):
            num = min(len(slot.decided), len(other.decided))
            assert num >= 3 and slot.decided[:num] == other.decided[:num]


def test_a_piece_of_a_prompt_sends_up_no_mask(device: FakeCuda, pair: Pair) -> None:
    num_tokens = 200
    with opened(pair, Case("long", GREEDY, NONE, is_drafted=False, prompts=(tuple(range(2, 2 + num_tokens)),))):
        device.take()
        pair.round()
        traffic = device.take()
    assert traffic.num_bytes_up < num_tokens**2
