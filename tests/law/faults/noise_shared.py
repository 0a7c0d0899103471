"""A target that keeps drafts with the uniforms that they were drawn with."""

from outrider.engine.sampling import noise as slot_noise
from outrider.engine.sampling.noise import NoiseStream, host_uniforms
from tests.law.faults import replace, run_target


def shared(seeds, choices, positions, purpose, *others):
    return host_uniforms(seeds, choices, positions, NoiseStream.DRAFT, *others)


if __name__ == "__main__":
    replace(slot_noise, "host_uniforms", shared)
    run_target()
