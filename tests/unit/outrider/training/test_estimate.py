"""How long a training of a head takes, before it has begun."""

from outrider.training.estimate import TrainingSizes


def test_an_estimate_counts_what_is_written_trained_and_held() -> None:
    sizes = TrainingSizes(1_000_000, 100_000, 500, 64, 200, 56, 10, 8, 3)
    assert sizes.generation_flops == 2e6 * 64 * 256
    assert sizes.training_flops == 10 * 8 * 256 * (2e6 + 6e5 * 3)
    assert sizes.memory_bytes == 4 * (1_000_000 + 400_000 + 3 * 8 * 200 * 500)
    assert sizes.disk_bytes == 4 * (64 * 256 + 400_000)
