"""`outrider up` without Ray: parts that end are started again or end the rest; impossible settings are named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.process_tree import tree
from tests.e2e.test_up import PLAIN, complete, http_of, up
from tests.forked import REPO
from tests.stack import DEMO_TARGET
from tests.tiny_models import tiny_llama


@pytest.mark.timeout(240)
def test_it_serves_without_a_draft_and_ends_without_a_target(tmp_path: Path) -> None:
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


def test_a_part_that_cannot_start_says_why_and_ends_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("draft: {log_format: json}")
    with tree() as left:
        command = up(*PLAIN, "--config", str(file), "--target", DEMO_TARGET, "--draft", str(tmp_path))
        assert command.wait() == 1
        assert command.err[-1].startswith("error: draft: ")
        assert str(tmp_path) in command.err[-1]
        assert left.now() == {}
        command.end()
