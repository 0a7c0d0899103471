"""The target's own noise on a device beside the host's, to the last bit. Unit tests ask a CPU, the GPU's a GPU."""

import numpy as np
import torch

from outrider.engine.sampling.coupled import coupled_id, coupled_ids, fixed_log, gumbels, gumbels_of, uniforms
from outrider.engine.sampling.noise import NoiseStream
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import SamplingParams

SEEDS = (0, 1, 2**32 + 5, 2**64 - 1)


def params_of(seed: int = 7, choice: int = 0) -> SamplingParams:
    return SamplingParams(seed=seed, choice=choice, acceptance=AcceptanceRule.COUPLED)


def random_law(rng: np.random.Generator, size: int, spread: float = 2.0) -> TokenDistribution:
    scores = (spread * rng.normal(size=size)).astype(np.float32)
    return TokenDistribution(size, scores - scores.max())


def check_noise(device: str, vocab_size: int = 999) -> None:
    """[R, V] float64, a row each of seeds, choices and positions at both ends of their ranges."""
    rows = [(seed, choice, position) for seed in SEEDS for choice in (0, 127) for position in (0, 2**32 - 1)]
    keys = torch.tensor([(s & 0xFFFFFFFF, s >> 32, c << 8 | NoiseStream.TARGET, p) for s, c, p in rows], device=device)
    made = gumbels(keys, vocab_size)
    assert made.device.type == device
    for row, (seed, choice, position) in zip(made.cpu(), rows, strict=True):
        assert (row.numpy() == gumbels_of(uniforms(params_of(seed, choice), position, vocab_size))).all()


def check_ids(device: str, vocab_size: int = 301) -> None:
    """The ids that the noise picks from random laws, one of which allows a single id."""
    rng = np.random.default_rng(3)
    laws = [random_law(rng, vocab_size) for _ in range(64)]
    laws[5].scores[np.arange(vocab_size) != 17] = -np.inf
    who = [params_of(seed, choice) for seed in SEEDS for choice in range(16)]
    log_probs = torch.from_numpy(np.stack([law.scores for law in laws])).to(device)  # [R, V] float32
    ids = coupled_ids(log_probs, who, range(64))
    assert ids.device.type == device
    assert ids.tolist() == [coupled_id(law, p, at) for at, (law, p) in enumerate(zip(laws, who, strict=True))]


def check_logarithm(device: str) -> None:
    x = logarithm_arguments()
    assert (fixed_log(x) == fixed_log(torch.from_numpy(x).to(device)).cpu().numpy()).all()


def logarithm_arguments() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Of (0, 1), near 1, of all sizes, and the ends of what the noise takes."""
    x = np.random.default_rng(0).random(20_000)
    return np.concatenate((x, 1.0 - 1e-12 * x, 10.0 ** (30 * x - 16), [2.0**-54, 1.0 - 2.0**-53, 1.0, 37.5]))
