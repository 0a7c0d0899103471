"""`outrider up` without Ray: parts that end are started again or end the rest; impossible settings are named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.up.restarts import DELAYS_S
from outrider.wire.processes.processes import StopFlag
from tests.e2e.process_tree import tree
from tests.e2e.test_up import PLAIN, complete, http_of, up
from tests.forked import REPO
from tests.stack import DEMO_TARGET
from tests.tiny_models import tiny_llama


@pytest.mark.timeout(240)
def test_without_a_draft_it_serves_a_gateway_is_started_again_and_without_a_target_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("gateways: 2")
    with tree() as left:
        command = up(*PLAIN, "--config", str(file))
        try:
            urls = [http_of(command), http_of(command)]
            text = complete(urls[0])["choices"]
            os.kill(left.pids_of("draft_service")[0], signal.SIGKILL)  # a new gateway is not to wait for it
            command.wait_for("plain decoding from now on")
            os.kill(left.pids_of("-m gateway")[0], signal.SIGKILL)
            index = int(command.wait_for("was ended by signal 9; it is started again").split()[0][-2])
            assert complete(urls[1 - index])["choices"] == text
            command.wait_for(f"gateway-{index}:  WARNING it serves again")
            assert complete(urls[index])["choices"] == text
            os.kill(left.pids_of("target_service")[0], signal.SIGKILL)
            assert command.wait() == 1
            assert "target-0 was ended by signal 9" in command.log()
            assert left.now() == {}
        finally:
            command.end()


@pytest.mark.slow
def test_a_folder_whose_template_is_none_ends_it_with_one_line(tmp_path: Path) -> None:
    """The gateway alone reads the template, which the target sends it."""
    folder = Path(tiny_llama(tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{% break %}")
    with tree() as left:
        command = up(*PLAIN, "--no-draft", "--target", str(folder))
        try:
            assert command.wait() == 1
            assert command.log().splitlines()[-1].startswith("error: gateway: chat_template.jinja ")
            assert left.now() == {}
        finally:
            command.end()


@pytest.mark.slow
def test_a_pair_named_by_hand_that_does_not_fit_ends_with_the_difference() -> None:
    """Of a draft with an encoder. The gateway alone would serve without it."""
    with tree() as left:
        command = up(*PLAIN, "--target", DEMO_TARGET, "--draft", str(REPO / "models/translation/draft"))
        assert command.wait() == 1
        assert command.err[-1].startswith("error: the draft at "), command.log()
        assert "draft draft does not fit target target: " in command.err[-1]
        assert left.now() == {}
        command.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_only_gateway_is_given_up_when_it_ends_again_and_again() -> None:
    with tree() as left:
        command = up(*PLAIN)
        try:
            http_of(command)
            for _ in DELAYS_S:
                os.kill(left.pids_of("-m gateway")[0], signal.SIGKILL)
                command.wait_for("it serves again")
            os.kill(left.pids_of("-m gateway")[0], signal.SIGKILL)
            assert command.wait() == 1
            given_up = f"given up, for it ended {len(DELAYS_S) + 1} times soon after its start"
            assert f"gateway was ended by signal 9; {given_up}" in command.log()
            assert left.now() == {}
        finally:
            command.end()


@pytest.mark.parametrize("log_format", [pytest.param("text", marks=pytest.mark.slow), "json"])
def test_a_part_that_cannot_start_says_why_and_ends_the_rest(tmp_path: Path, log_format: str) -> None:
    file = tmp_path / "system.yaml"
    file.write_text(f"draft: {{log_format: {log_format}}}")
    with tree() as left:
        command = up(*PLAIN, "--config", str(file), "--target", DEMO_TARGET, "--draft", str(tmp_path))
        assert command.wait() == 1
        assert command.err[-1].startswith("error: draft: ")
        assert str(tmp_path) in command.err[-1]
        assert left.now() == {}
        command.end()


@pytest.mark.parametrize(
    ("args", "yaml", "message"),
    [
        (("--target", "x"), "", "only one model of the pair is named; say --draft MODEL, "),
        (("--draft", "x", "--no-draft"), "", "--no-draft and --draft contradict"),
        (("--tree", "3x2", "--no-draft"), "", "--no-draft and --tree contradict"),
        (("--dtype", "float8"), "", "target.dtype is 'float8'"),
        (("--port", "70000"), "", "gateway.port is '70000'"),
        (("--config", "{file}"), "target: {max_slotz: 3}", "target.max_slotz is no setting; did you mean max_slots?"),
        (("--config", "{file}"), "pools: {}", "'pools' is no part of a system"),
        (("--config", "{file}"), "drafts: {}", "drafts without targets: name the pools of both"),
        (("--config", "{file}", "--draft", "x"), "targets: {a: {model: t}}", "--draft is for one target and one draft"),
        (("--config", "{file}"), "gateway: {target: a:1}", "gateway.target is 'a:1': it follows from where"),
        (("--config", "{file}"), "gateway:", "gateway is None, must be settings by name"),
        (("--config", "{file}"), "target: [", "is not YAML"),
        (("--config", "{file}"), "", "is empty; name a part"),
        (("--config", "{file}"), "gateway: {port: 1, port: 2}", "line 1: 'port' is there twice; keep one"),
        (("--config", "{file}"), "targets: {a: {model: x}, a: {model: y}}", "line 1: 'a' is there twice; keep one"),
        (("--config", "{file}"), "- 1", "must be settings by name"),
        (("--config", "/nowhere.yaml"), "", "cannot read /nowhere.yaml: No such file"),
    ],
)
def test_bad_settings_are_one_line(
    args: tuple[str, ...], yaml: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which keeps its own handlers of signals, and before anything would be started."""
    monkeypatch.setattr(StopFlag, "install", lambda _: None)
    monkeypatch.setattr("outrider.cli.up.up.Supervisor", None)
    # Its own writes to the descriptor of this process's stderr.
    monkeypatch.setattr(
        "outrider.cli.up.up.serving_console", lambda: Console(stderr=True, soft_wrap=True, markup=False)
    )
    file = tmp_path / "system.yaml"
    file.write_text(yaml)
    ended = CliRunner().invoke(app, ["up", *(arg.format(file=file) for arg in args)])
    assert ended.exit_code == 1
    (line,) = ended.stderr.splitlines()
    assert message in line
