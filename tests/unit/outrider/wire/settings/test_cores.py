"""CPU cores: what the setting says, and who gets which."""

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.settings.cores import format_cores, parse_cores, share_cores, shares


@pytest.mark.parametrize(
    ("num_cores", "num_targets", "num_drafts", "shared"),
    [
        (2, 1, 1, (1, 1)),
        (3, 1, 1, (2, 1)),
        (4, 1, 1, (3, 1)),
        (8, 1, 1, (6, 2)),
        (8, 2, 2, (3, 1)),
        (16, 2, 4, (6, 1)),
        (5, 2, 2, (1, 1)),
        (2, 2, 2, (0.5, 0.5)),
        (2, 1, 2, (0.66, 0.66)),
        (4, 2, 0, (2, 0)),
        (1, 1, 1, (0.5, 0.5)),
    ],
)
def test_targets_have_most_cores_and_workers_share_one_where_there_are_too_few(
    num_cores: int, num_targets: int, num_drafts: int, shared: tuple[float, float]
) -> None:
    assert shares(num_cores, num_targets, num_drafts) == shared
    assert num_targets * shared[0] + num_drafts * shared[1] <= num_cores


def test_a_list_of_cores_is_read_and_written() -> None:
    assert parse_cores("0,2-3") == {0, 2, 3} and parse_cores(" 7 , 4095") == {7, 4095}
    assert format_cores({10, 9, 2}) == "2,9,10"
    for text in ("", "0,", "3-2", "-1", "a", "4096", "0-4096", "1 - 2", "\u0663"):
        with pytest.raises(ValueError, match=r"^cpu cores are .*, must look like 0 or 0,2-3$"):
            parse_cores(text)


def test_workers_on_the_cpu_share_what_settings_leave() -> None:
    target, draft = TargetConfig(model="t"), DraftConfig(model="d")
    pair = {"target": ("target", target), "draft": ("draft", draft)}
    four = frozenset(range(4))
    assert share_cores(pair, pair, four) == {"draft": {0}, "target": {1, 2, 3}}
    assert share_cores(pair, ["draft"], four) == {"target": None, "draft": {0, 1, 2, 3}}
    told = {**pair, "target": ("target", target.model_copy(update={"cpu_cores": "0-1"}))}
    assert share_cores(told, told, four) == {"target": {0, 1}, "draft": {2, 3}}
    assert share_cores(pair, pair, frozenset({5})) == {"draft": {5}, "target": {5}}, "one core, which both have"
    with pytest.raises(ConfigError, match="cpu_cores asks for core 1, this machine offers 0,2"):
        share_cores(told, told, frozenset({0, 2}))
