"""`outrider pull` on a terminal: interrupted, killed and cut off in the middle, it fetches only the rest."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.forked import REPO, clean_environment
from tests.hub_mirror import mirroring
from tests.stack import DEMO_TARGET
from tests.terminal import terminal

WEIGHTS = "model.safetensors"
SHORT_OF_FIRST, FIRST = 5_000_000, 9_000_000
ON_THE_WAY = 1_000_000
"""Bytes that a process may have been sent and not have written when it ends."""


def test_only_the_rest_is_fetched_after_a_ctrl_c_a_kill_and_a_cut(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in Path(DEMO_TARGET).iterdir()}
    with mirroring("demo/target", files) as mirror:
        env = clean_environment() | {"HF_ENDPOINT": mirror.url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = (sys.executable, "-m", "outrider.cli", "pull", "demo/target")
        mirror.hold_after[WEIGHTS] = SHORT_OF_FIRST
        with terminal(*command, env=env, columns=300, cwd=str(REPO)) as shown:
            assert mirror.held.wait(30), shown.text()
            shown.wait_for(re.compile(r"fetched .* 5\.\d/22\.3 MB"))
            shown.press("\x03")  # while the connection stalls
            assert shown.wait(5) == 130
            assert "interrupted: the same command goes on where it stopped" in shown.text()
        mirror.held.clear()
        mirror.hold_after[WEIGHTS] = FIRST
        with terminal(*command, env=env, columns=300, cwd=str(REPO)) as shown:  # and end it by SIGKILL
            assert mirror.held.wait(30), shown.text()
            shown.wait_for(re.compile(r"fetched .* 9\.\d/22\.3 MB .* [kM]B/s"))
        mirror.hold_after.clear()
        mirror.cut_after[WEIGHTS] = 5_000_000
        with terminal(*command, env=env, columns=300, cwd=str(REPO)) as shown:
            assert shown.wait(60) == 0, shown.text()
            assert re.search(r"fetched .* 22\.3/22\.3 MB", shown.text())
            folder, start = shown.text().rstrip().splitlines()[-2:]
            assert start == "start it: outrider up --target demo/target --draft DRAFT, or --no-draft"
        assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == files
        size = len(files[WEIGHTS])
        assert not mirror.cut_after and size <= mirror.num_bytes[WEIGHTS] <= size + 2 * ON_THE_WAY
