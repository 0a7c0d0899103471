"""The counter-based generator: published answers, keys and counters, and the map to (0, 1)."""

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.engine.sampling.noise import NoiseStream, host_philox4x32, host_uniforms

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


def column(*values: int) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def draw(seed: int, choice: int, position: int, purpose: NoiseStream, round_: int = 0, sample_index: int = 0) -> float:
    return float(host_uniforms(column(seed), column(choice), column(position), purpose, round_, sample_index)[0])


@pytest.mark.parametrize(("given", "expected"), KNOWN_ANSWERS)
def test_published_vectors(given: str, expected: str) -> None:
    words = column(*(int(word, 16) for word in given.split()))[:, None]
    assert [f"{int(word):08x}" for word in host_philox4x32(words[:4], words[4:])[:, 0]] == expected.split()


@pytest.mark.parametrize("num", [0, 1, 2, 7, 500])
def test_equals_unbounded_integers_on_random_input(num: int) -> None:
    words = np.random.default_rng(4).integers(0, 2**32, (6, num), dtype=np.uint64)
    result = host_philox4x32(words[:4], words[4:])
    assert result.dtype == np.uint64 and result.shape == (4, num)
    assert result.T.tolist() == [philox_by_hand(each[:4], each[4:]) for each in words.T.tolist()]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_key_and_counter_layout(seed: int) -> None:
    choice, position, round_, sample_index = 1023, 4_000_000_000, 3_999_999_998, 5
    counter = [round_, position, NoiseStream.OWN_DRAFT | choice << 8, sample_index]
    words = philox_by_hand(counter, [seed & WORD, seed >> 32])
    expected = (words[0] << 21 | words[1] >> 11) / 2**53
    assert draw(seed, choice, position, NoiseStream.OWN_DRAFT, round_, sample_index) == expected


def test_every_part_of_the_key_changes_the_number() -> None:
    base = draw(5, 1, 9, NoiseStream.ACCEPT)
    others = [
        draw(5 + 2**32, 1, 9, NoiseStream.ACCEPT),
        draw(6, 1, 9, NoiseStream.ACCEPT),
        draw(5, 2, 9, NoiseStream.ACCEPT),
        draw(5, 1, 10, NoiseStream.ACCEPT),
        draw(5, 1, 9, NoiseStream.OWN_DRAFT),
        draw(5, 1, 9, NoiseStream.ACCEPT, round_=8),
        draw(5, 1, 9, NoiseStream.ACCEPT, sample_index=1),
    ]
    assert len({base, *others}) == 8


def test_a_number_does_not_depend_on_its_batch() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 100, dtype=np.uint64)
    positions = np.arange(100, dtype=np.uint64)
    choices, purposes = positions % 3, generator.choice(np.array(NoiseStream, dtype=np.uint64), 100)
    together = host_uniforms(seeds, choices, positions, purposes)
    order = generator.permutation(100)
    reordered = host_uniforms(seeds[order], choices[order], positions[order], purposes[order])
    assert reordered.tolist() == together[order].tolist()
    alone = [draw(int(seeds[i]), i % 3, i, NoiseStream(int(purposes[i]))) for i in range(100)]
    assert together.tolist() == alone


def test_open_interval_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, expected in ((0, 2.0**-54), (WORD, 1 - 2.0**-53)):
        words = np.full((4, 1), word, dtype=np.uint64)
        monkeypatch.setattr("outrider.engine.sampling.noise.host_philox4x32", lambda counter, key, words=words: words)
        assert draw(0, 0, 0, NoiseStream.DRAFT) == expected
        assert 0.0 < expected < 1.0
