"""`outrider alpha`: its arithmetic, and the whole command on small models whose answer is known."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.lab.alpha import show
from outrider.lab.models.alpha import measure
from outrider.lab.models.alpha_task import MODEL, AlphaTask, DrafterSpec
from tests.stack import DEMO_TARGET, OTHER_DRAFT
from tests.tiny_models import tiny_llama, tiny_t5


@pytest.fixture(scope="module", params=["decoder", pytest.param("encoder-decoder", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("alpha")
    for name, seed in (("target", 4), ("draft", 3)):
        if request.param == "decoder":
            tiny_llama(made / name, seed=seed, hidden_size=16, num_layers=1, context=64, sharpness=1.5)
        else:
            tiny_t5(made / name, seed=seed, num_layers=1)
    (made / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"the {i}"}) for i in range(12)))
    return made


def measured(folder: Path, *args: str) -> Any:
    where = ("--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl"))
    return CliRunner().invoke(app, ["alpha", *where, *args])


def test_the_target_itself_is_always_right_and_another_keeps_within_its_bounds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    drafts = ("--draft", str(folder / "target"), "--draft", str(folder / "draft"), "--draft", "ngram")
    made = measured(folder, *drafts, "--max-tokens", "12", "--temperature", "0", "--temperature", "1", "--json")
    assert made.exit_code == 0, made.stderr
    found = json.loads(made.stdout)["rows"]
    rows = {(row["setting"]["temperature"], row["drafter"].split("/")[-1]): row for row in found}
    assert len(rows) == 6 and all(12 <= row["num_tokens"] <= 12 * 12 for row in rows.values())
    for temperature in (0.0, 1.0):
        own = rows[temperature, "target"]
        assert own["alpha"]["mean"] == pytest.approx(1.0, abs=1e-4)
        assert own["coupled"]["mean"] == own["greedy"]["mean"] == 1.0
        assert own["draft_temperature"]["temperature"] == temperature
        assert own["draft_temperature"]["gain"]["mean"] == 0.0
    other = rows[1.0, "draft"]
    slack = other["coupled"]["error"] + 1e-9
    assert 0.1 < other["alpha"]["mean"] < 0.9
    assert other["bound"]["mean"] - slack <= other["coupled"]["mean"] <= other["alpha"]["mean"] + slack
    greedy = rows[0.0, "draft"]
    assert greedy["alpha"]["mean"] == pytest.approx(greedy["greedy"]["mean"])
    assert rows[1.0, "ngram"]["drafted"]["mean"] < 1.0 == other["drafted"]["mean"]


@pytest.mark.parametrize(("sharper", "temperature", "best"), [(0.8, 1.0, 0.8), (2.0, 0.5, 1.0)])
def test_a_draft_that_is_the_target_at_another_temperature_gets_that(
    tmp_path: Path, sharper: float, temperature: float, best: float
) -> None:
    """Its logits are `sharper` times the target's."""
    for name, sharpness in (("target", 1.5), ("draft", 1.5 * sharper)):
        tiny_llama(tmp_path / name, seed=4, hidden_size=16, num_layers=1, context=64, sharpness=sharpness)
    drafter = DrafterSpec(MODEL, str(tmp_path / "draft"))
    settings = [{"temperature": temperature}]
    *_, measured = measure(AlphaTask(str(tmp_path / "target"), [drafter], ["the 1", "the 2"], 12, settings))
    (row,) = measured["rows"]
    found = row["draft_temperature"]
    assert found["temperature"] == pytest.approx(best)
    assert found["alpha"]["mean"] == pytest.approx(1.0, abs=1e-5) and row["alpha"]["mean"] < 0.99
    assert found["gain"]["mean"] == pytest.approx(found["alpha"]["mean"] - row["alpha"]["mean"])
    console = Console(width=80, file=io.StringIO(), record=True)
    show(measured["rows"], console)
    shown = console.export_text().splitlines()[-1].split()
    assert shown[1:3] == [f"{temperature:g}", f"{best:g}"] and shown[3].startswith("1.000±")


def test_a_draft_of_another_tokenizer_is_compared_over_the_targets_tokens() -> None:
    prompts = ["def read(self, size):\n", "import os\n\nclass Queue:\n"]
    *_, measured = measure(
        AlphaTask(DEMO_TARGET, [DrafterSpec(MODEL, OTHER_DRAFT)], prompts, 16, [{"temperature": 0.0}])
    )
    (row,) = measured["rows"]
    assert 0.2 < row["alpha"]["mean"] == row["greedy"]["mean"] < 0.9 and row["drafted"]["mean"] == 1.0
