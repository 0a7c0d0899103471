"""`outrider up` without Ray: parts that end are started again or end the rest."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.process_tree import tree
from tests.e2e.test_up import PLAIN, complete, http_of, up
from tests.stack import DEMO_TARGET


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
