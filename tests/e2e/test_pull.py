"""`outrider pull` on a terminal: interrupted, killed and cut off in the middle, it comes to the same files."""

import sys
from pathlib import Path

from tests.forked import REPO, clean_environment
from tests.hub_mirror import mirroring
from tests.stack import DEMO_TARGET
from tests.terminal import terminal

WEIGHTS = "model.safetensors"
ON_THE_WAY = 15_000_000
"""Bytes that a process may have been sent and not have written when its connection breaks: it writes 10 MB a time."""
HELD_AFTER = 5_000_000


def unfinished(folder: Path) -> list[Path]:
    return list(folder.rglob("*.incomplete"))


def test_whole_files_are_fetched_once_for_a_ctrl_c_a_kill_and_a_cut(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in Path(DEMO_TARGET).iterdir()}
    with mirroring("demo/target", files) as mirror:
        env = clean_environment() | {"HF_ENDPOINT": mirror.url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = (sys.executable, "-m", "outrider.cli", "pull", "demo/target")
        mirror.hold_after[WEIGHTS] = HELD_AFTER
        with terminal(*command, env=env, columns=300, cwd=str(REPO)) as shown:
            assert mirror.held.wait(30), shown.text()
            shown.wait_for(f"Fetching {len(files)} files")
            shown.press("\x03")  # while the connection stalls
            assert shown.wait(5) == 130
            assert "interrupted: the same command fetches what is missing" in shown.text()
        assert not unfinished(tmp_path)
        mirror.held.clear()
        mirror.num_bytes[WEIGHTS] = 0
        with terminal(*command, env=env, columns=300, cwd=str(REPO)) as shown:  # and end it by SIGKILL
            assert mirror.held.wait(30), shown.text()
        mirror.hold_after.clear()
        mirror.cut_after[WEIGHTS] = HELD_AFTER
        mirror.num_bytes[WEIGHTS] = 0
        with terminal(*command, env=env, columns=300, cwd=str(REPO)) as shown:
            assert shown.wait(60) == 0, shown.text()
            folder, start = shown.text().rstrip().splitlines()[-2:]
            assert start == "start it: outrider up --target demo/target --draft DRAFT, or --no-draft"
        assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == files
        assert not mirror.cut_after
        for name, content in files.items():
            assert mirror.num_bytes[name] <= len(content) + ON_THE_WAY, name
