"""`outrider pull` on a terminal: killed in the middle, then cut off in the middle, it fetches only the rest."""

from __future__ import annotations

import time
from pathlib import Path

from tests.hub_mirror import mirroring
from tests.pseudo_terminal import OnTerminal
from tests.stack import DEMO_TARGET

WEIGHTS = "model.safetensors"
FIRST = 9_000_000
ON_THE_WAY = 1_000_000
"""Bytes that a process may have been sent and not have written when it is killed."""


def test_only_the_rest_is_fetched_after_a_kill_and_a_cut(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in Path(DEMO_TARGET).iterdir()}
    with mirroring("demo/target", files) as mirror:
        env = {"HF_ENDPOINT": mirror.url, "HF_HOME": str(tmp_path)}
        mirror.hold_after[WEIGHTS] = FIRST
        with OnTerminal("pull", "demo/target", env=env) as command:
            assert mirror.held.wait(30), command.text
            give_up = time.monotonic() + 10
            while "9." not in command.text and time.monotonic() < give_up:
                time.sleep(0.05)
            assert "/22.3 MB" in command.text and "MB/s" in command.text, command.text
            command.process.kill()
            command.wait()
        mirror.hold_after.clear()
        mirror.cut_after[WEIGHTS] = 5_000_000
        with OnTerminal("pull", "demo/target", env=env) as command:
            assert command.wait() == 0, command.text
            assert "22.3/22.3 MB" in command.text
            folder, start = command.text.rstrip().splitlines()[-2:]
            assert start == "start it: outrider up --target demo/target --draft DRAFT, or --no-draft"
        assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == files
        size = len(files[WEIGHTS])
        assert not mirror.cut_after and size <= mirror.num_bytes[WEIGHTS] <= size + ON_THE_WAY
