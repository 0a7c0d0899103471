"""What messages do to a target whose slots step by themselves."""

import pytest

from outrider.engine.model_runner import ModelRunner
from outrider.engine.worker.jobs import TruncateJob
from target_service.leases.hold import MAX_HOLD_S
from tests.tiny_models import tiny_llama
from tests.unit.target_service.step.test_step import NUM_PROMPT, Fixed, load


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(tiny_llama(tmp_path_factory.mktemp("model"), sharpness=3.0))


def test_an_old_truncate_does_not_crop_a_target_that_is_ahead(runner: ModelRunner) -> None:
    target = Fixed(runner)
    slot = target.slot_lease.slot
    for _ in range(4):
        assert target.step_after(MAX_HOLD_S)
    num_cached = len(slot.cached)
    target.verifier.handle(TruncateJob(1, 0, NUM_PROMPT + 1, "rejected"))
    assert len(slot.cached) == num_cached == len(slot.committed) - 1
    target.verifier.handle(TruncateJob(1, 0, NUM_PROMPT + 1, "stop"))
    assert len(slot.cached) == NUM_PROMPT and not target.leases.running()
