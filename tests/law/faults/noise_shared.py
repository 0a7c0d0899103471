"""A target that keeps drafts with the uniforms that they were drawn with."""

import sys

from outrider.engine.sampling import noise as slot_noise
from outrider.engine.sampling.noise import NoiseStream, host_uniforms
from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.worker import start_worker
from tests.law.faults import replace


def shared(seeds, choices, positions, purpose, *others):
    return host_uniforms(seeds, choices, positions, NoiseStream.DRAFT, *others)


if __name__ == "__main__":
    replace(slot_noise, "host_uniforms", shared)
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
