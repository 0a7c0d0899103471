"""The counter-based generator: published answers, keys and counters, and the map to (0, 1)."""

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.engine.noise import Purpose, host_philox4x32, host_uniforms, philox4x32, uniforms

# Random123, tests/kat_vectors, the three "philox4x32 10" lines: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORD = 0xFFFFFFFF


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """The paper's rounds in Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & WORD, p0 >> 32 ^ c[3] ^ k[1], p0 & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def draw(seed: int, choice: int, position: int, purpose: Purpose, candidate: int = 0) -> float:
    def one(value: int) -> torch.Tensor:
        return torch.tensor([value])

    signed = seed - 2**64 if seed >= 2**63 else seed
    return float(uniforms(one(signed), one(choice), one(position), purpose, one(candidate)))


@pytest.mark.parametrize(("given", "expected"), KNOWN_ANSWERS)
def test_published_vectors(given: str, expected: str) -> None:
    words = [torch.tensor([int(word, 16)]) for word in given.split()]
    result = philox4x32(tuple(words[:4]), tuple(words[4:]))
    assert [f"{int(word):08x}" for word in result] == expected.split()


def test_equals_unbounded_integers_on_random_input() -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 2**32, (6, 500), generator=generator)
    result = torch.stack(philox4x32(tuple(words[:4]), tuple(words[4:])), dim=1)
    columns = words.T.tolist()
    assert result.tolist() == [philox_by_hand(column[:4], column[4:]) for column in columns]


def test_numpy_and_torch_give_the_same_bits() -> None:
    generator = np.random.default_rng(4)
    for num in (0, 1, 2, 7, 500):
        words = generator.integers(0, 2**32, (6, num), dtype=np.uint64)
        found = host_philox4x32(words[:4], words[4:])
        wanted = philox4x32(
            *(tuple(torch.from_numpy(w.astype(np.int64)) for w in part) for part in (words[:4], words[4:]))
        )
        assert found.dtype == np.uint64 and found.tolist() == torch.stack(wanted).tolist()
        seeds = generator.integers(0, 2**64, num, dtype=np.uint64)
        choices, positions = generator.integers(0, 2**24, num), generator.integers(0, 2**32, num)
        purposes = generator.integers(1, 5, num)
        ours = host_uniforms(seeds, *(column.astype(np.uint64) for column in (choices, positions, purposes)))
        theirs = uniforms(*map(torch.from_numpy, (seeds.view(np.int64), choices, positions, purposes)))
        assert ours.tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_key_and_counter_layout(seed: int) -> None:
    choice, position, candidate = 1023, 4_000_000_000, 77
    words = philox_by_hand([candidate, position, Purpose.RECOVER | choice << 8, 0], [seed & WORD, seed >> 32])
    expected = (words[0] << 21 | words[1] >> 11) / 2**53
    assert draw(seed, choice, position, Purpose.RECOVER, candidate) == expected


def test_every_part_of_the_key_changes_the_number() -> None:
    base = draw(5, 1, 9, Purpose.ACCEPT, 3)
    others = [
        draw(5 + 2**32, 1, 9, Purpose.ACCEPT, 3),
        draw(6, 1, 9, Purpose.ACCEPT, 3),
        draw(5, 2, 9, Purpose.ACCEPT, 3),
        draw(5, 1, 10, Purpose.ACCEPT, 3),
        draw(5, 1, 9, Purpose.RECOVER, 3),
        draw(5, 1, 9, Purpose.ACCEPT, 4),
    ]
    assert len({base, *others}) == 7


def test_a_number_does_not_depend_on_its_batch() -> None:
    positions = torch.arange(100)
    seeds, choices = torch.full_like(positions, 42), positions % 3
    together = uniforms(seeds, choices, positions, Purpose.DRAFT)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms(seeds[order], choices[order], positions[order], Purpose.DRAFT), together[order])
    assert together.tolist() == [draw(42, p % 3, p, Purpose.DRAFT) for p in range(100)]


def test_open_interval_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.tensor([0])
    for word, expected in ((0, 2.0**-54), (WORD, 1 - 2.0**-53)):
        words = tuple(torch.tensor([word]) for _ in range(4))
        monkeypatch.setattr("outrider.engine.noise.philox4x32", lambda counter, key, words=words: words)
        assert float(uniforms(one, one, one, Purpose.DRAFT)) == expected
        assert 0.0 < expected < 1.0


def test_uniform_and_independent_between_purposes_positions_and_seeds() -> None:
    num = 40_000
    index = torch.arange(num)
    zeros = torch.zeros_like(index)
    streams = {p.name: uniforms(zeros + 7, zeros, index, p) for p in Purpose}
    streams["next position"] = uniforms(zeros + 7, zeros, index + 1, Purpose.DRAFT)
    streams["next seed"] = uniforms(zeros + 8, zeros, index, Purpose.DRAFT)
    streams["seeds at one position"] = uniforms(index, zeros, zeros + 3, Purpose.DRAFT)
    for name, values in streams.items():
        assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-6, name
    names = list(streams)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            cells = (streams[first] * 8).long() * 8 + (streams[second] * 8).long()
            counts = torch.bincount(cells, minlength=64)
            assert stats.chisquare(counts.numpy()).pvalue > 1e-6, (first, second)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares CPU with CUDA: needs a GPU")
def test_same_bits_on_cuda() -> None:
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (10_000,), generator=generator)
    positions = torch.randint(0, 2**32, (10_000,), generator=generator)
    choices = torch.randint(0, 1024, (10_000,), generator=generator)
    on_cpu = uniforms(seeds, choices, positions, Purpose.TARGET)
    on_gpu = uniforms(seeds.cuda(), choices.cuda(), positions.cuda(), Purpose.TARGET)
    assert torch.equal(on_cpu, on_gpu.cpu())
