"""Options that commands share: groups of them, a request's, and what the shell completes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.options import Generation, completed_draft, grouped
from outrider.client import Speculation, StructuredOutputs
from outrider.wire.errors import InvalidRequest


@dataclass(frozen=True)
class Limits:
    a: Annotated[int, typer.Option("--first")] = 1
    b: str | None = None


def test_a_group_is_an_option_per_field() -> None:
    caught: list[tuple[str, Limits]] = []
    app = typer.Typer()

    def command(name: str, limits: Limits) -> None:
        caught.append((name, limits))

    command.__annotations__ = {"name": str, "limits": Limits, "return": None}
    app.command()(grouped(command))
    assert CliRunner().invoke(app, ["x", "--first", "5"]).exit_code == 0
    assert CliRunner().invoke(app, ["y", "--b", "z"]).exit_code == 0
    assert caught == [("x", Limits(5, None)), ("y", Limits(1, "z"))]


def test_what_is_not_given_is_left_to_the_server(tmp_path: Path) -> None:
    assert Generation().options(None, 9) == {
        "max_tokens": 9,
        "temperature": 1.0,
        "stop": (),
        "speculation": Speculation(),
    }
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}')
    found = Generation(top_k=0, stop=["a"], json_schema=schema, num_draft_tokens="auto", no_speculation=True)
    assert found.options("m", 1) == {
        "max_tokens": 1,
        "temperature": 1.0,
        "stop": ["a"],
        "top_k": 0,
        "model": "m",
        "structured_outputs": StructuredOutputs(json='{"type": "null"}'),
        "speculation": Speculation(enabled=False, num_draft_tokens="auto"),
    }


def test_a_k_or_a_schema_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="num_draft_tokens is 'many', must be"):
        Generation(num_draft_tokens="many").options(None, 1)
    schema = tmp_path / "schema.json"
    schema.write_bytes(b"\xff")
    with pytest.raises(typer.BadParameter, match=r"schema\.json cannot be read"):
        Generation(json_schema=schema).options(None, 1)


def test_a_draft_is_completed_by_drafters_and_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ngrams", "[n]"):
        (tmp_path / name).mkdir()
    (tmp_path / "ngram.txt").touch()
    assert completed_draft("ng") == ["ngram", "ngrams/"]
    assert completed_draft("big") == ["bigram:"]
    assert completed_draft("[n") == [], "the shell does it"
