"""What is checked of a training's folders before anything is loaded, and the sizes that its cost follows from."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.engine.heads.checkpoint import TargetFiles
from outrider.training.task import REPORT, Kind, check_folders, estimate_sizes
from outrider.wire.errors import ConfigError
from tests.unit.outrider.training.tiny_training import task


def test_an_earlier_training_may_be_replaced_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = task(folder, out)
    assert check_folders(asked).keys() == {str(folder / "target")}
    out.mkdir()
    check_folders(asked)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="out', which holds something else than an earlier training; name a new"):
        check_folders(asked)
    (out / REPORT).write_text("{}")
    check_folders(asked)
    with pytest.raises(ConfigError, match=r"notes\.txt', which holds something else"):
        check_folders(replace(asked, out=str(out / "notes.txt")))


@pytest.mark.parametrize(
    ("kind", "num_trained"), [("eagle3", 9000 // 3 + 3 * 16 * 16), ("medusa", 2 * 16 * 16), ("pass", 2 * 16)]
)
def test_what_is_trained_of_each_kind(
    folder: Path, target: TargetFiles, tmp_path: Path, kind: Kind, num_trained: int
) -> None:
    """A target of 3 layers, 16 wide, and two draft tokens; prompts of 5 and of 2 tokens."""
    asked = replace(task(folder, tmp_path / "out"), kind=kind)
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    sizes = estimate_sizes(asked, target, {asked.target: 9000}, 12, prompts)
    assert (sizes.num_target_parameters, sizes.num_trained_parameters) == (9000, num_trained)
    assert sizes.prompt_tokens == 3
    started = replace(asked, start=str(folder / "draft"))
    sizes = estimate_sizes(started, target, {asked.target: 9000, str(folder / "draft"): 700}, 12, prompts)
    assert sizes.num_trained_parameters == 700
