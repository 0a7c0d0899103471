"""Options that are made of settings: which there are, and what they hand on."""

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.up.setting_options import with_settings
from outrider.wire.settings.pools import Values

CAUGHT: list[tuple[str, dict[str, Values]]] = []
APP = typer.Typer()


@APP.command()
@with_settings
def command(name: str = "", *, settings: dict[str, Values]) -> None:
    """Take them."""
    CAUGHT.append((name, settings))


def test_each_part_gets_what_was_typed_for_it_as_text() -> None:
    typed = ["--name", "x", "--max-queue", "7", "--target-max-slots", "3", "--no-draft-prefix-caching"]
    made = CliRunner().invoke(APP, typed)
    assert made.exit_code == 0, made.output
    name, settings = CAUGHT.pop()
    assert name == "x" and set(settings) == {"gateway", "target", "draft"}
    given = {
        part: {key: value for key, value in values.items() if value is not None} for part, values in settings.items()
    }
    assert given == {"gateway": {"max_queue": "7"}, "target": {"max_slots": "3"}, "draft": {"prefix_caching": False}}


@pytest.mark.parametrize(
    "flag", ["--port", "--registry", "--target", "--target-model", "--draft-drafter", "--max-slots"]
)
def test_what_up_decides_itself_has_no_option(flag: str) -> None:
    assert CliRunner().invoke(APP, [flag, "1"]).exit_code == 2 and not CAUGHT
