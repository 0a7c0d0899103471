"""Keys of a head's config.json under several names, and values of another type."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.config_keys import MAX_NUMBER, Keys
from outrider.wire.errors import ConfigError


def keys(folder: Path, **config: Any) -> Keys:
    (folder / "config.json").write_text(json.dumps(config))
    return Keys(Checkpoint(str(folder)), "part")


def test_a_key_is_found_under_each_name_and_in_each_place(tmp_path: Path) -> None:
    found = keys(tmp_path, size=5, part={"block": 5, "deep": 2, "none": None}, other={"far": 1})
    assert (found.get("size", "block"), found.get("deep"), found.get("far"), found.get("none")) == (5, 2, None, None)
    with pytest.raises(ConfigError, match=r"^size or deep of .* is both 5 and 2; leave one of them in config\.json"):
        found.get("size", "deep")


@pytest.mark.parametrize("value", [0, 8, "4", 4.0, True, None])
def test_a_number_is_whole_and_within_its_bounds(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"of .* is {value!r}, must be a whole number from 1 to 7; correct its"):
        keys(tmp_path, size=value).number("size", "block", min_value=1, max_value=7)


def test_a_number_at_its_bounds_is_valid_and_an_error_has_the_name_in_the_file(tmp_path: Path) -> None:
    found = keys(tmp_path, low=2, high=MAX_NUMBER, over=MAX_NUMBER + 1)
    assert (found.number("low", min_value=2), found.number("high", min_value=2)) == (2, MAX_NUMBER)
    with pytest.raises(ConfigError, match=r"^over of .* is 2147483649, must be a whole number from 2 to 2147483648"):
        found.number("above", "over", min_value=2)


def test_a_flag_is_true_false_or_not_there(tmp_path: Path) -> None:
    found = keys(tmp_path, on=True, off=False, one=1)
    assert (found.flag("on"), found.flag("off"), found.flag("absent")) == (True, False, None)
    with pytest.raises(ConfigError, match=r"^one of .* is 1, must be true or false"):
        found.flag("one")
