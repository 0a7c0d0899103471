"""A target that keeps and recovers with the uniforms that the draft drew its tokens with."""

import sys

from outrider.engine.noise import Purpose
from outrider.engine.slot_noise import slot_uniforms
from outrider.wire.config import TargetConfig
from outrider.wire.worker_main import run_worker
from target_service import verifier
from target_service.worker import start_worker


def shared(params, positions, purpose, device):
    return slot_uniforms(params, positions, Purpose.DRAFT, device)


if __name__ == "__main__":
    verifier.slot_uniforms = shared
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
